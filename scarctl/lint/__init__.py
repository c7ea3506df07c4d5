"""Observe a training for cheap and certain signs of a mistake, and warn. Nothing depends on it."""

UNSAVED = "attributes"
"""Kind of the warning that nothing saves some attributes of an object that training changes."""
