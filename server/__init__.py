"""The ways in from outside: the OpenAI-compatible HTTP server and the `novainfer` command line."""
