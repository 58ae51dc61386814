"""State dicts of a Graph, and checkpoints in files: saved, checked and loaded."""
