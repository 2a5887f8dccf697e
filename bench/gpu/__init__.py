"""What a GPU can do, what the kernels get out of it, and whether what they give is right."""
