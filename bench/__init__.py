"""What is fast, and against what: every figure is a ratio to a baseline measured in the same run, turn by turn."""
