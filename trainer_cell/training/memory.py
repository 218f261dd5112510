"""Whether a pass can fit into memory at all, asked on every rank before any begins it.

What is estimated is the least a pass can need: what is refused would have ended the cell, and what is not may still.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.build import Base
from trainer_cell.training.packing import Row
from trainer_cell.training.recompute import RecomputedLayer

# Tensors of the hidden width, a token, that the backward pass of a layer needs at least: inputs of its two norms,
# of q, k, v and of the MLP's three products, and what attention and activation return.
_KEPT_BY_A_LAYER = 8
_CGROUP = Path("/sys/fs/cgroup")


def check_memory(base: Base, rows: Sequence[Row]) -> None:
    """Raises `CommandFailed` (OUT_OF_MEMORY) when the activations of a training pass over `rows` cannot be kept."""
    needed, free = least_bytes(base, rows), free_bytes(base.device)
    if needed > free:
        longest = max(sum(row.lengths) for row in rows)
        raise CommandFailed(
            ErrorKind.OUT_OF_MEMORY,
            f"a row of {longest} tokens needs at least {needed >> 20} MiB and {free >> 20} MiB are free: "
            "send shorter sequences, or serve with --recompute",
        )


def least_bytes(base: Base, rows: Sequence[Row]) -> int:
    """Of the activations that are kept at once on this rank."""
    if not rows:
        return 0
    layers = base.model.decoder.layers
    is_recomputed = any(isinstance(layer, RecomputedLayer) for layer in layers)
    a_token = base.shape.hidden * base.dtype.itemsize * len(layers) * (1 if is_recomputed else _KEPT_BY_A_LAYER)
    # Under pipeline parallelism so many rows are in the air at once.
    longest = sorted((sum(row.lengths) for row in rows), reverse=True)[: base.layout.pipeline]
    return int(sum(longest) * a_token)


def free_bytes(device: torch.device) -> int:
    """What this process can still have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limit, used = (_CGROUP / "memory.max", _CGROUP / "memory.current")
    if limit.exists() and (allowed := limit.read_text().strip()) != "max":
        return min(available, int(allowed) - int(used.read_text()))
    return available
