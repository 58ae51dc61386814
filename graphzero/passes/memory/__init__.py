"""Passes about memory: what is held, how long, and in which storage."""
