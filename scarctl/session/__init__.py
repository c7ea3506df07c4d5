"""Run one session in one process: resume, checkpoint, recover, roll back, close."""
