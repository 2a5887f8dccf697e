"""The scripts that made the demo model: its training text, tokenizer, training and evaluation."""
