"""Checkpoint directories on disk: written, published, verified, read, listed and deleted without torch."""
