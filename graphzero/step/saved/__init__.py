"""What of a Graph is saved and loaded: its state dicts, and checkpoints in files."""
