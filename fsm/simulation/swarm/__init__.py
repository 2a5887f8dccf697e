"""Worlds that seeds draw, and what came of them."""
