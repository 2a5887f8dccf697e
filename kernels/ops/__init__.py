"""The operations of a model: implementations, which of them run here, and the proofs that they may."""
