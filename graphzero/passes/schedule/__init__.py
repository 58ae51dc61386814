"""What moves and is written when: buckets, launches, waits, slots, assigns."""
