"""Save copies from the arena to the store as requests ask, and decide when to retry."""
