"""Provide the command line: one thin file per command over the library."""
