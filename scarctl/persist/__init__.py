"""Move hand-overs from the arena to the store: choose the next one to save, and when to retry."""
