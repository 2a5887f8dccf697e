"""What must hold in a world, by accounts of their own."""
