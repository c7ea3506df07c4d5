"""Adapters between scarctl and training frameworks, found through the entry points `scarctl.adapters`."""
