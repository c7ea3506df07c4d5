"""Describe the saved state: groups of tensors cut into partitions, and extras. Only torch_dtypes imports torch."""
