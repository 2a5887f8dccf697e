"""The Triton functions themselves: what runs on the GPU, and nothing else."""
