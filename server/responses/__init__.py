"""OpenAI's Responses API: conversations as items, answers as typed events, and responses that are kept."""
