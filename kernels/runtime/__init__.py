"""A loaded model that computes steps: its modes, its draft model, and KV blocks in the host's memory."""
