"""Stores that earlier versions of scarctl have written. New versions read them forever (docs/FORMAT.md, section 12).

Each folder is a store as `python -m tests.golden.write FOLDER` made it, with the version of scarctl that its name says,
but for the locks. They are never written anew: a later format gets folders of its own. Those in `sessions` were made by
`tests.golden.write_session`, before and after a process got one log for all of its shards.
"""
