"""Checkpoints of other make, read once into an ordinary checkpoint, and ours written out for others.

`python -m trainer_cell.checkpoint.formats` is the program; what it reads and writes is told in `native`, `torch_dist`,
`peft` and `peft_export`.
"""
