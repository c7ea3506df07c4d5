"""Checkpoint a live model: measure distances, copy rows into the arena during training, and hand them over."""
