"""Hold a run's newest copies in shared memory, which outlives the process that trains. Imports no torch."""
