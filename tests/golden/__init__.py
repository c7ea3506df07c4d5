"""Stores that earlier versions of scarctl have written. New versions read them forever (docs/FORMAT.md, section 12).

Each folder has the number of the format in its name, and stores as `python -m tests.golden.write FOLDER` and
`tests.golden.write_session` made them, without the locks. They are never written again: a later format gets new
folders.
"""
