"""Kernels for NVIDIA GPUs, written in Triton: what calls them, what compiles them, and when they can be had."""
