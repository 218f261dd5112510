"""Copying between parts of a tensor, against the plain loop over its elements."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from trainer_cell.vault.region import Region, copy_overlap


@st.composite
def region_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Region(start, tuple(draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True)))


@st.composite
def tensors_with_two_parts(draw: st.DrawFn) -> tuple[Region, Region, int]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    return draw(region_in(shape)), draw(region_in(shape)), draw(st.sampled_from([1, 2, 8]))


def elements(region: Region) -> list[tuple[int, ...]]:
    return list(product(*(range(start, start + size) for start, size in zip(region.start, region.shape, strict=True))))


def value(element: tuple[int, ...], item_bytes: int) -> bytes:
    number: int = 1 + sum(at * 5**axis for axis, at in enumerate(element)) % 255
    return number.to_bytes(1, "little") * item_bytes


@given(tensors_with_two_parts())
def test_exactly_the_common_elements_are_copied(case: tuple[Region, Region, int]) -> None:
    held, wanted, item_bytes = case
    source = b"".join(value(element, item_bytes) for element in elements(held))
    target = bytearray(len(elements(wanted)) * item_bytes)
    copy_overlap(memoryview(source), held, memoryview(target), wanted, item_bytes)
    common = set(elements(held)) & set(elements(wanted))
    expected = b"".join(
        value(element, item_bytes) if element in common else bytes(item_bytes) for element in elements(wanted)
    )
    assert bytes(target) == expected
    assert held.overlaps(wanted) == bool(common)
