"""The `novainfer` command line."""
