"""The HTTP service in front of a trainer cell."""
