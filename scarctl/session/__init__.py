"""One run in one process: resume, checkpoint, recover, roll back, close."""
