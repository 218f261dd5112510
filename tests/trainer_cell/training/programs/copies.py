"""What several ranks hold alike stays alike, bit for bit: `main(DIRECTORY, TP)` on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer_cell.training.arithmetic import ADAM, batches
from tests.trainer_cell.training.whole import assembled
from tests.trainer_cell.training.wire import forward_backward_command, optim_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.ranks import Ranks
from trainer_cell.training import optimizer
from trainer_cell.training.build import build_base, start_parallel
from trainer_cell.training.slots import SlotTable
from trainer_cell.training.step import forward_backward, optim_step

# Large, so that ranks of different shares of the vocabulary differ in much.
SPEC = AdapterSpec(64, 8.0, train_attn=True, train_mlp=True, train_unembed=True)


def each_to_its_own(directory: Path, tensor: int) -> None:
    """The control: every tensor-parallel rank keeps the sum that it got."""
    optimizer.dist = _NoBroadcast()
    main(directory, tensor)


class _NoBroadcast:
    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name == "broadcast" else getattr(dist, name)


def main(directory: Path, tensor: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks()
    layout = Layout(world=ranks.world, tensor=tensor, pipeline=1, data=ranks.world // tensor)
    start_parallel(layout)
    base = build_base(directory, layout, torch.device("cpu"), torch.float32)
    slot = SlotTable(base, 1, SPEC.rank).create("one", SPEC, seed=1)
    for batch in batches(base.shape.vocab, 2, (17, 5, 33, 2, 64, 21)):
        forward_backward(base, slot, ranks, forward_backward_command(batch))
        optim_step(slot, ranks, optim_command(ADAM))
    state = slot.state()
    for part in (state.weight, state.exp_avg, state.exp_avg_sq):
        assembled(ranks, slot.adapter.table, part)
    dist.destroy_process_group()
