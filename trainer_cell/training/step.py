"""forward_backward and optim_step of one slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer_cell.protocol.commands import AdamParams, ForwardBackward, OptimStep
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import ForwardBackwardDone, OptimStepDone
from trainer_cell.ranks import Ranks
from trainer_cell.training.attention import packed
from trainer_cell.training.build import Base
from trainer_cell.training.gradients import gathering
from trainer_cell.training.inputs import check_adam, read_sequences
from trainer_cell.training.losses import Loss, Tokens, find_loss
from trainer_cell.training.lr_schedule import scheduled
from trainer_cell.training.memory import check_memory
from trainer_cell.training.packing import Row, pack, share, tokens_per_row
from trainer_cell.training.slots import Slot


@dataclass(frozen=True)
class _Answer:
    """What came of one datum: its place in the command, float32 log-probabilities as bytes, its summed loss, and how
    many of its tokens the loss counted, by name."""

    index: int
    logprobs: bytes
    loss: float
    counts: dict[str, int]


LossOfRow = Callable[[Row, torch.Tensor], tuple[torch.Tensor, torch.Tensor, list[_Answer]]]


@dataclass(frozen=True)
class _Pass:
    """One rank's part of a command."""

    gradient: torch.Tensor | None
    answers: list[_Answer]


def forward_backward(base: Base, slot: Slot, ranks: Ranks, command: ForwardBackward) -> ForwardBackwardDone:
    """Losses and logprobs of all data; the gradient of their sum is added to the slot's unless `forward_only`.

    Every rank calls it together and gets the same. Raises `CommandFailed`, the same on every rank, with the slot as it
    was. Under tensor or pipeline parallelism only what goes wrong before the pass is such a failure; anything else is
    raised as it is, for the cell to end.
    """
    rows, loss_of_row = ranks.agree(lambda: _prepare(base, command))

    def compute() -> _Pass:
        return _run(base, slot, rows, loss_of_row, command.forward_only)

    is_local = base.layout.tensor * base.layout.pipeline == 1
    done = ranks.agree(compute) if is_local else _without_verdict(compute)
    answers = _in_order(ranks.gather(done.answers), len(command.data))
    if done.gradient is not None:
        slot.optimizer.accumulate(done.gradient)
    return ForwardBackwardDone(
        command.command_id,
        tuple(answer.logprobs for answer in answers),
        _metrics(answers),
    )


def optim_step(slot: Slot, ranks: Ranks, command: OptimStep) -> OptimStepDone:
    """One AdamW step; every rank calls it together. Raises `CommandFailed`, with nothing changed, for bad parameters,
    for rates that nobody gives, or when no gradient was accumulated since the last step."""
    optimizer = slot.optimizer

    def check() -> AdamParams:
        adam = scheduled(command.adam, command.scheduled, optimizer.scheduler)
        check_adam(adam)
        if not optimizer.has_gradients:
            raise CommandFailed(ErrorKind.NO_GRADIENTS, "no forward_backward has succeeded since the last optim_step")
        return adam

    metrics = optimizer.apply(ranks.agree(check))
    return OptimStepDone(command.command_id, optimizer.step, optimizer.iteration, metrics)


def _prepare(base: Base, command: ForwardBackward) -> tuple[list[Row], LossOfRow]:
    """This rank's rows, and what the last pipeline stage makes of each."""
    loss = find_loss(command.loss, command.loss_config)
    sequences = read_sequences(command, loss, base.description)
    lengths = [len(sequence) for sequence in sequences]
    mine = share(lengths, base.layout.data)[parallel_state.get_data_parallel_rank()]
    limit = tokens_per_row(sum(lengths[index] for index in mine), base.layout.pipeline)
    rows = pack(sequences, mine, base.device, limit)
    if not command.forward_only:
        check_memory(base, rows)
    return rows, partial(_loss_of_row, base, loss)


def _without_verdict(compute: Callable[[], _Pass]) -> _Pass:
    """Where other ranks wait inside the pass, a raise cannot be answered for: it ends the cell."""
    try:
        return compute()
    except CommandFailed as failure:
        raise RuntimeError("a pass over several ranks failed on this one") from failure


def _run(base: Base, slot: Slot, rows: list[Row], loss_of_row: LossOfRow, forward_only: bool) -> _Pass:
    if forward_only:
        with slot.adapter.active(), torch.no_grad():
            return _Pass(None, _through_model(base, rows, loss_of_row, forward_only=True))
    with slot.adapter.active(), gathering(slot.adapter) as gradient:
        answers = _through_model(base, rows, loss_of_row, forward_only=False)
    return _Pass(gradient, answers)


def _through_model(base: Base, rows: list[Row], loss_of_row: LossOfRow, forward_only: bool) -> list[_Answer]:
    """The rows one after another, each forward and backward; answers on the last pipeline stage."""
    if not rows:
        return []  # Megatron's schedule would run one row all the same

    def forward(rows_left: Iterator[Row], model: Any) -> tuple[torch.Tensor, Any]:
        row = next(rows_left)
        hidden = model(row.tokens, row.positions, None, packed_seq_params=packed(row.lengths))
        return hidden, partial(loss_of_row, row)

    answers: list[list[_Answer]] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(rows),
        model=[base.model],
        num_microbatches=len(rows),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return []  # its peer says the same
    return [answer for of_row in answers for answer in of_row]


def _loss_of_row(
    base: Base, loss: Loss, row: Row, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[_Answer]]:
    """Hidden states [1, tokens, hidden] -> (summed loss, a token count Megatron asks for, answers)."""
    assert base.head is not None
    logprobs = base.head.target_logprobs(hidden.squeeze(0), row.inputs["target_tokens"])
    terms, counts = loss.terms(Tokens(logprobs, row.inputs, row.lengths))
    return terms.sum(), torch.ones((), dtype=torch.int), _answers(row, logprobs, terms, counts)


def _answers(row: Row, logprobs: torch.Tensor, terms: torch.Tensor, counts: dict[str, torch.Tensor]) -> list[_Answer]:
    said = logprobs.detach().cpu().split(row.lengths)
    losses = terms.detach().double().cpu().split(row.lengths)
    counted = {name: marks.cpu().split(row.lengths) for name, marks in counts.items()}
    return [
        _Answer(
            index,
            said[place].numpy().astype("<f4").tobytes(),
            float(losses[place].sum()),
            {name: int(marks[place].sum()) for name, marks in counted.items()},
        )
        for place, index in enumerate(row.indices)
    ]


def _metrics(answers: Sequence[_Answer]) -> dict[str, float]:
    """All are sums, so that they add up over the parts into which the SDK cuts a call."""
    counted = {f"{name}:sum": float(sum(answer.counts[name] for answer in answers)) for name in answers[0].counts}
    return {"loss:sum": sum(answer.loss for answer in answers), **counted}


def _in_order(of_ranks: Sequence[Sequence[_Answer]], num_data: int) -> list[_Answer]:
    answers = sorted((answer for of_rank in of_ranks for answer in of_rank), key=lambda answer: answer.index)
    assert [answer.index for answer in answers] == list(range(num_data))
    return answers
