"""The flight recorder without files or clock: what happened, as bytes, and how it is run again."""
