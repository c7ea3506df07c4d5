"""Training on several ranks: which part of the state each one saves, and what they have to agree on.

Every rank is a shard of the store, and its session is an ordinary one on the rows that it owns.
"""
