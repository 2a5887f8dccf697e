"""Our own CPU kernels: C++ without dependencies, compiled at first use, called through ctypes."""
