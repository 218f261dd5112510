"""Faults of every kind at any moment, over the unmodified SDK; what is left must be what a quiet run leaves."""
