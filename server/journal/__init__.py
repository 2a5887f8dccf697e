"""The request journal: what is asked and what has been answered, in a file that survives the server."""
