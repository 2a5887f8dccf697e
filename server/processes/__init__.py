"""HTTP in processes of its own: what they and the engine's process say to each other, and what keeps them running."""
