"""Work on a store without a run: save, recover, export and survey state files."""
