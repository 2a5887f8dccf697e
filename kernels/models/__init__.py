"""The model families: `kernels.models.registry` has their tables, by the name in config.json."""
