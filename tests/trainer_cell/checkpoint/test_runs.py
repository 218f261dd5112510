"""What lies side by side is one span, and no value that is not finite is missed."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_cell.checkpoint.runs import Placed, find_spans, is_finite


def test_tensors_side_by_side_in_both_places_are_one_span() -> None:
    placed = [Placed("b", 108, 116, 2), Placed("a", 100, 108, 0), Placed("c", 116, 120, 4)]
    (span,) = find_spans(placed, 4)
    assert (span.keys, span.begin, span.end, span.target) == (("a", "b", "c"), 100, 120, 0)


@pytest.mark.parametrize(
    "second",
    [Placed("b", 112, 116, 2), Placed("b", 108, 112, 16), Placed("b", 96, 100, 2)],
    ids=["gap as read", "gap in the slot", "other order"],
)
def test_a_gap_in_either_place_begins_another_span(second: Placed) -> None:
    assert [span.keys for span in find_spans([Placed("a", 100, 108, 0), second], 4)] == [("a",), ("b",)]


def test_tensors_without_elements_are_in_no_span() -> None:
    assert find_spans([Placed("a", 100, 100, 0)], 4) == []
    assert [span.keys for span in find_spans([Placed("a", 8, 8, 0), Placed("b", 8, 12, 0)], 4)] == [("b",)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, value: float, count: int) -> None:
    largest = torch.finfo(dtype).max
    values = torch.full((count,), largest, dtype=dtype)
    values[::2] = -largest
    assert is_finite(values)
    for at in range(count):
        held = values[at].clone()
        values[at] = value
        assert not is_finite(values)
        values[at] = held
