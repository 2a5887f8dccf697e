"""Small worlds, explored completely, and what was reached."""
