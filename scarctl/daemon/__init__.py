"""Save outside the training process: one daemon per host and user. Imports no torch."""
