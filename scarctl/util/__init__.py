"""Provide helpers that do not depend on scarctl: arrays, text, limits on parsers, a thread with a queue."""
