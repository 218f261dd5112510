"""The cell's side of the comparison, a layout at a time: `main(DIRECTORY, [MODEL:TPxPP…])` on every rank.

Reads DIRECTORY/MODEL and DIRECTORY/MODEL.initial.pt; rank 0 writes DIRECTORY/MODEL.WORLD.TPxPP.pt: the record and, of
some, the record of one that is given the reference's gradients, and of a run whose ranks average (what must not be
taken for right).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.trainer_cell.training.arithmetic import ADAM, ALPHA, RANK, Datum, Record, Step, Tensors, batches
from tests.trainer_cell.training.whole import assembled, cut
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
    """All sequences in one packed row, no adapter; nothing where the model is spread over a pipeline."""
    if base.layout.pipeline > 1:
        return []
    assert base.head is not None
    lengths = tuple(len(datum.tokens) for datum in batch)
    tokens = torch.cat([datum.tokens for datum in batch])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        hidden = base.model(tokens, positions, None, packed_seq_params=packed(lengths))
        part = base.head.logits(hidden[0])
    parts = [torch.empty_like(part) for _ in range(base.layout.tensor)]
    dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    logits = torch.cat(parts, -1)
    assert bool((logits[:, base.shape.vocab :] == -torch.inf).all())
    return list(logits[:, : base.shape.vocab].split(lengths))


def slot_with(base: Base, values: Tensors) -> Slot:
    slot = SlotTable(base, 1, RANK).create("compared", SPEC, seed=0)
    for name, tensor in slot.state().master.items():
        tensor.copy_(cut(values[name], slot.adapter.table[name]))
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
        dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
        gradients = assembled(ranks, slot.adapter.table, slot.adapter.views(summed))
        metrics = optim_step(slot, ranks, optim_command(ADAM)).metrics
        said = done.metrics["loss:sum"]
        steps.append(Step(logprobs_of(done), said, gradients, metrics["grad_norm"], *copied(ranks, slot)))
    return steps


def step_from(base: Base, ranks: Ranks, began: Tensors, gradients: list[Tensors]) -> list[Step]:
    """Norm, clipping and AdamW alone: the first data-parallel rank has the gradients, the others zero."""
    slot, steps = slot_with(base, began), []
    is_first = parallel_state.get_data_parallel_rank() == 0
    for given in gradients:
        flat = torch.zeros_like(slot.optimizer.master)
        for name, view in slot.adapter.views(flat).items():
            view.copy_(cut(given[name], slot.adapter.table[name]) * is_first)
        slot.optimizer.accumulate(flat)
        metrics = optim_step(slot, ranks, optim_command(ADAM)).metrics
        steps.append(Step([], 0.0, {}, metrics["grad_norm"], *copied(ranks, slot)))
    return steps


def copied(ranks: Ranks, slot: Slot) -> tuple[Tensors, Tensors, Tensors]:
    state, table = slot.state(), slot.adapter.table
    exp_avg, exp_avg_sq, weight = (
        assembled(ranks, table, part) for part in (state.exp_avg, state.exp_avg_sq, state.weight)
    )
    return exp_avg, exp_avg_sq, weight


def run(directory: Path, model: str, layout: Layout, ranks: Ranks) -> dict[str, Record]:
    base = build_base(directory / model, layout, torch.device("cpu"), torch.float32)
    began: Tensors = torch.load(directory / f"{model}.initial.pt")
    theirs: Record = torch.load(directory / f"{model}.reference.pt", weights_only=False)
    lengths = tuple(len(said) for said in theirs.steps[0].logprobs)
    data = batches(base.shape.vocab, len(theirs.steps), lengths)
    logits = base_logits(base, data[0])
    records = {"sum": Record(logits, train(base, ranks, began, data))}
    if model in ("tiny", "odd-vocabulary", "qwen3"):
        records["given"] = Record([], step_from(base, ranks, began, [step.gradients for step in theirs.steps]))
    if model == "tiny" and layout.data == layout.world:
        records["mean"] = Record(logits, train(base, ranks, began, data, average=True))
    return records


def main(directory: Path, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, world = Ranks(), int(os.environ["WORLD_SIZE"])
    for job in jobs:
        model, sizes = job.split(":")
        tensor, pipeline = map(int, sizes.split("x"))
        layout = Layout(world=world, tensor=tensor, pipeline=pipeline, data=world // (tensor * pipeline))
        start_parallel(layout)
        records = run(directory, model, layout, ranks)
        if ranks.is_first:
            torch.save(records, directory / f"{model}.{world}.{sizes}.pt")
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()
