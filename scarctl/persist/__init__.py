"""Move hand-overs from the arena to the store: what to write next, and when to try again."""
