"""Bugs that are planted, to see that they are found."""
