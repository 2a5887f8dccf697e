"""The model families, each in one file; `kernels.models.registry` maps architecture names to them."""
