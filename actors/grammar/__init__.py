"""What answers are held to: grammars compiled, advanced by committed tokens, and asked for masks, off the loop."""
