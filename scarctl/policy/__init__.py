"""Choose which partitions a checkpoint saves, and when the next checkpoint is due."""
