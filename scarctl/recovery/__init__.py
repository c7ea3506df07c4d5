"""Find the newest copies of partitions, plan the source of each, and copy them. No torch."""
