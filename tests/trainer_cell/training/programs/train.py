"""`torchrun … -m …train DIRECTORY MODEL…`: the cell's side of the comparison, one data-parallel rank a process.

Reads DIRECTORY/MODEL and DIRECTORY/MODEL.initial.pt; rank 0 writes DIRECTORY/MODEL.WORLD.pt: the record, the record of
a run whose ranks average (what must not be taken for right), and of one that is given the reference's gradients.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer_cell.training.arithmetic import ADAM, ALPHA, RANK, Datum, Record, Step, Tensors, batches
from tests.trainer_cell.training.wire import forward_backward_command, logprobs_of, optim_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.ranks import Ranks
from trainer_cell.training.attention import packed
from trainer_cell.training.build import Base, build_base, start_parallel
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward, optim_step

SPEC = AdapterSpec(RANK, ALPHA, train_attn=True, train_mlp=True, train_unembed=True)


def base_logits(base: Base, batch: list[Datum]) -> list[torch.Tensor]:
    """All sequences in one packed row, no adapter."""
    assert base.head is not None
    lengths = tuple(len(datum.tokens) for datum in batch)
    tokens = torch.cat([datum.tokens for datum in batch])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        hidden = base.model(tokens, positions, None, packed_seq_params=packed(lengths))
        return list(base.head.logits(hidden[0]).split(lengths))


def slot_with(base: Base, values: Tensors) -> Slot:
    slot = SlotTable(base, 1, RANK).create("compared", SPEC, seed=0)
    for name, tensor in slot.state().master.items():
        tensor.copy_(values[name])
    return slot


def train(base: Base, ranks: Ranks, began: Tensors, data: list[list[Datum]], average: bool = False) -> list[Step]:
    slot, steps = slot_with(base, began), []
    for batch in data:
        done = forward_backward(base, slot, ranks, forward_backward_command(batch))
        gradient = slot.optimizer.gradient
        assert gradient is not None
        if average:
            gradient.div_(ranks.world)
        summed = gradient.clone()
        dist.all_reduce(summed)
        stepped = optim_step(slot, ranks, optim_command(ADAM))
        steps.append(
            Step(
                logprobs_of(done),
                done.metrics["loss:sum"],
                slot.adapter.views(summed),
                stepped.metrics["grad_norm"],
                *copied(slot),
            )
        )
    return steps


def step_from(base: Base, ranks: Ranks, began: Tensors, gradients: list[Tensors]) -> list[Step]:
    """Norm, clipping and AdamW alone: rank 0 has the gradients, the other ranks zero."""
    slot, steps = slot_with(base, began), []
    for given in gradients:
        flat = torch.zeros_like(slot.optimizer.master)
        for name, view in slot.adapter.views(flat).items():
            view.copy_(given[name] * (ranks.rank == 0))
        slot.optimizer.accumulate(flat)
        metrics = optim_step(slot, ranks, optim_command(ADAM)).metrics
        steps.append(Step([], 0.0, {}, metrics["grad_norm"], *copied(slot)))
    return steps


def copied(slot: Slot) -> tuple[Tensors, Tensors, Tensors]:
    state = slot.state()
    exp_avg, exp_avg_sq, weight = (
        {name: tensor.clone() for name, tensor in part.items()}
        for part in (state.exp_avg, state.exp_avg_sq, state.weight)
    )
    return exp_avg, exp_avg_sq, weight


def run(directory: Path, model: str, layout: Layout, ranks: Ranks) -> None:
    base = build_base(directory / model, layout, torch.device("cpu"), torch.float32)
    began: Tensors = torch.load(directory / f"{model}.initial.pt")
    theirs: Record = torch.load(directory / f"{model}.reference.pt", weights_only=False)
    lengths = tuple(len(said) for said in theirs.steps[0].logprobs)
    data = batches(base.shape.vocab, len(theirs.steps), lengths)
    logits = base_logits(base, data[0])
    records = {"sum": Record(logits, train(base, ranks, began, data))}
    if model != "smollm2":  # which takes long
        records["mean"] = Record(logits, train(base, ranks, began, data, average=True))
        records["given"] = Record([], step_from(base, ranks, began, [step.gradients for step in theirs.steps]))
    if ranks.rank == 0:
        torch.save(records, directory / f"{model}.{ranks.world}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    cell = Layout(world=world, tensor=1, pipeline=1, data=world)
    start_parallel(cell)
    everyone = Ranks()
    for one in sys.argv[2:]:
        run(Path(sys.argv[1]), one, cell, everyone)
    dist.barrier()
    dist.destroy_process_group()
