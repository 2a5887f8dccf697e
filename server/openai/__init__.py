"""OpenAI's endpoints: bodies to requests, deltas to objects and server-sent events."""
