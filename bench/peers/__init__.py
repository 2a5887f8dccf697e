"""Systems under test, each in a process and an environment of its own, and the command that sets them side by side."""
