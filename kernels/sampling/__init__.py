"""From logits to tokens, and which tokens of a verified draft count."""
