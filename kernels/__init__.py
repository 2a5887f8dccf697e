"""Everything that touches a device: models, attention, sampling, weights, buffers. Imports nothing."""
