"""Attacks on the store: each a module to be run by hand in its long form; the tests beside run short forms."""
