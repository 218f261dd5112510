"""Which rank computes which sequences, and which go through the model together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from trainer_cell.training.inputs import Sequence

# Tokens of one packed row; a longer sequence is a row of its own.
TOKENS_PER_ROW = 4096

# A pipeline of s stages stands still for s - 1 rows of each pass: with this many rows a stage, for a fifth of the time
# or less. Rows shorter than the least are not worth their overhead.
_ROWS_PER_STAGE = 4
_LEAST_TOKENS_PER_ROW = 128


@dataclass(frozen=True)
class Row:
    """Sequences end to end. indices: their places in the command; tokens, positions: int64 [1, sum(lengths)];
    inputs: [sum(lengths)] each."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    inputs: dict[str, torch.Tensor]


def share(lengths: Seq[int], num_ranks: int) -> list[list[int]]:
    """Indices for each rank, ascending: the longest first to whoever has least, ties to the lower index and rank.
    A rank may get none."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(indices) for indices in shares]


def tokens_per_row(total: int, num_stages: int) -> int:
    """The limit of a row for `total` tokens: smaller rows where a pipeline needs several to keep its stages at work."""
    if num_stages == 1:
        return TOKENS_PER_ROW
    share = -(-total // (_ROWS_PER_STAGE * num_stages))
    return min(TOKENS_PER_ROW, max(_LEAST_TOKENS_PER_ROW, share))


def pack(sequences: Seq[Sequence], indices: Seq[int], device: torch.device, limit: int = TOKENS_PER_ROW) -> list[Row]:
    """Rows of the sequences at `indices`, in their order, on `device`."""
    groups: list[list[int]] = []
    total = 0
    for index in indices:
        total += len(sequences[index])
        if not groups or total > limit:
            groups.append([])
            total = len(sequences[index])
        groups[-1].append(index)
    return [_row(sequences, group, device) for group in groups]


def _row(sequences: Seq[Sequence], indices: Seq[int], device: torch.device) -> Row:
    members = [sequences[index] for index in indices]
    lengths = tuple(len(member) for member in members)
    return Row(
        indices=tuple(indices),
        lengths=lengths,
        tokens=torch.cat([member.tokens for member in members]).unsqueeze(0).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device),
        inputs={name: torch.cat([member.inputs[name] for member in members]).to(device) for name in members[0].inputs},
    )
