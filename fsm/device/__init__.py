"""The device's side of the machines: the worker, the processes that hold a device, and which of them is which."""
