"""The real tinker SDK, unmodified, against a real gateway with a fake cell behind it."""
