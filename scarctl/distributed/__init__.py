"""Coordinate the ranks of one job: ownership, selection, resume step, recovery."""
