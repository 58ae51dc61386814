"""Passes about transfers and writes: buckets, launches, waits, slots, assigns."""
