"""Slots with adapters over a frozen base, and what is done to them."""

from trainer_cell.training.compiler import switch_off_without_gpu

# Every module that imports megatron-core lies in here, so this comes before it.
switch_off_without_gpu()
