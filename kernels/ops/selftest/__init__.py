"""Proofs of one kernel against the torch reference on this machine: numbers, rows given back, row invariance.

Each function gives None, or one phrase that says what was wrong. They run at load, so they are small: a few
milliseconds each.
"""
