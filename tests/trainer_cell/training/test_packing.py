from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_cell.training.build import Base
from trainer_cell.training.inputs import Sequence
from trainer_cell.training.output_head import OutputHead
from trainer_cell.training.packing import TOKENS_PER_ROW, pack, share, tokens_per_row

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 50), max_size=30)


def sequences(lengths: list[int]) -> list[Sequence]:
    return [
        Sequence(torch.full((length,), index), {"weights": torch.full((length,), float(index))})
        for index, length in enumerate(lengths)
    ]


@given(LENGTHS, st.integers(1, 5))
def test_every_sequence_goes_to_one_rank_and_loads_differ_by_one_sequence_at_most(
    lengths: list[int], num_ranks: int
) -> None:
    shares = share(lengths, num_ranks)
    assert sorted(index for indices in shares for index in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) for indices in shares)
    loads = [sum(lengths[index] for index in indices) for indices in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_rank_may_get_nothing() -> None:
    assert share([5], 2) == [[0], []]


@given(LENGTHS, st.integers(1, 60))
def test_rows_hold_the_sequences_in_order_under_the_limit(lengths: list[int], limit: int) -> None:
    rows = pack(sequences(lengths), range(len(lengths)), CPU, limit)
    assert [index for row in rows for index in row.indices] == list(range(len(lengths)))
    for row in rows:
        assert sum(row.lengths) <= limit or len(row.lengths) == 1
        assert row.tokens.shape == row.positions.shape == (1, sum(row.lengths))
        parts = zip(row.indices, row.tokens[0].split(row.lengths), row.positions[0].split(row.lengths), strict=True)
        for index, tokens, positions in parts:
            assert bool((tokens == index).all())
            assert positions.tolist() == list(range(lengths[index]))


@pytest.mark.parametrize("with_gradient", [True, False])
def test_logprobs_in_chunks_kept_or_computed_again_are_those_of_all_logits_at_once(
    base: Base, with_gradient: bool
) -> None:
    assert base.head is not None
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(37, base.shape.hidden, generator=generator)
    targets = torch.randint(0, base.shape.vocab, (37,), generator=generator)
    said, gradients = [], []
    chunk = 10 * base.shape.vocab
    for at_once, kept in ((1 << 26, 1 << 28), (chunk, 1 << 28), (chunk, chunk)):
        head = OutputHead(base.head.weight, at_once, kept)
        head.projections = base.head.projections
        inputs = hidden.clone().requires_grad_(with_gradient)
        said.append(head.target_logprobs(inputs, targets))
        if with_gradient:
            (said[-1] * torch.arange(37)).sum().backward()
            gradients.append(inputs.grad)
    expected = torch.log_softmax(hidden @ base.head.weight.t(), -1).gather(-1, targets[:, None])[:, 0]
    assert all(torch.allclose(values, expected, atol=1e-5) for values in said)
    assert torch.equal(said[1], said[2])
    if with_gradient:
        assert torch.allclose(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize(
    ("total", "num_stages", "limit"),
    [
        (100, 1, TOKENS_PER_ROW),  # one stage waits for nobody
        (1_000_000, 4, TOKENS_PER_ROW),
        (8_000, 2, 1_000),  # four rows a stage
        (8_000, 4, 500),
        (100, 4, 128),  # not worth cutting
    ],
)
def test_a_pipeline_gets_rows_enough_to_keep_its_stages_at_work(total: int, num_stages: int, limit: int) -> None:
    assert tokens_per_row(total, num_stages) == limit
