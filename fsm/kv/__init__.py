"""Who has which part of the KV cache: the interface that the scheduler asks, and the implementation in blocks."""
