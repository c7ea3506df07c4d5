"""Observe a training for cheap and certain signs of a mistake, and warn. Nothing depends on it."""
