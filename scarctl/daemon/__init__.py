"""Saving outside the training step: the arena in shared memory, the hand-over queue, the persister. No torch here."""
