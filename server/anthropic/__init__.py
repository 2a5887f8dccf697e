"""Anthropic's messages, made of the same answers as OpenAI's chat completions."""
