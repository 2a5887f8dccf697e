"""What runs next: requests, the queue, steps and their commits, speculation, and what follows from failures."""
