"""Stores that earlier versions of scarctl have written. New versions read them forever (docs/FORMAT.md, section 12).

Each folder is a store as `python -m tests.golden.write FOLDER` made it, without the locks, with the version of scarctl
in its name. They are never written again: a later format gets new folders. Those in `sessions` were made by
`tests.golden.write_session`, before and after a process got one log for all of its shards.
"""
