"""Everything that touches a device: models, attention, sampling, weights and buffers. Imports nothing here."""
