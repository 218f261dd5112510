"""`python -m …memory BASE_DIRECTORY TOKENS [recompute] [bf16]`: prints the most memory, in MiB, that one
forward_backward over one sequence takes in a process of its own, and its seconds."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer_cell.training.arithmetic import batches
from tests.trainer_cell.training.wire import forward_backward_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.ranks import Ranks
from trainer_cell.training.build import build_base, start_parallel
from trainer_cell.training.slots import SlotTable
from trainer_cell.training.step import forward_backward

SPEC = AdapterSpec(32, 32.0, train_attn=True, train_mlp=True, train_unembed=True)
ALONE = Layout(world=1, tensor=1, pipeline=1, data=1)


def main(directory: Path, num_tokens: int, options: set[str]) -> None:
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    base = build_base(directory, ALONE, torch.device("cpu"), dtype, recompute="recompute" in options)
    slot = SlotTable(base, 1, SPEC.rank).create("one", SPEC, seed=1)
    command = forward_backward_command(batches(base.shape.vocab, 1, (num_tokens,))[0])
    began = time.monotonic()
    forward_backward(base, slot, Ranks(), command)
    taken = time.monotonic() - began
    assert slot.optimizer.gradient is not None
    assert bool(slot.optimizer.gradient.any())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, round(taken, 1))  # noqa: T201


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}/store", rank=0, world_size=1)
        start_parallel(ALONE)
        main(Path(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:]))
        dist.destroy_process_group()
