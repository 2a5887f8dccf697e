"""From prompts to token ids off the loop: the tokenizer, its threads, and the process that renders chats."""
