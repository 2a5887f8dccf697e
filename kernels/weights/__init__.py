"""From a model's folder to packed weights: checkpoints, the hub, and weights that processes share."""
