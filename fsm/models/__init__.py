"""Several models in one server: whether each is loaded, who waits for it, and which one makes room for another."""
