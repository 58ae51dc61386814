"""What is held, how long, and in whose storage."""
