"""What an answer says beside its content, in the format that its model writes: reasoning, and calls of tools."""
