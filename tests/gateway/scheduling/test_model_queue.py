"""One model's order, whatever the arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduling.errors import InvalidRequest, SequenceConflict
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.model_queue import REMEMBERED, KeyBook, ModelQueue
from gateway.scheduling.models import Model
from tests.gateway.scheduling.rig import save

BOOK = FutureBook()


def accept(queue: ModelQueue, one: Future, seq_id: int | None, fingerprint: bytes) -> None:
    queue.reserve(one, seq_id, fingerprint)
    queue.place(one, seq_id)


def new_queue() -> ModelQueue:
    queue = ModelQueue(Model("s:train:0", "s", "alice", None, None, None, {}))
    accept(queue, future("create"), 0, b"create")
    return queue


def future(name: str) -> Future:
    return BOOK.open("alice", "s:train:0", save(name))


def names(queue: ModelQueue) -> list[str]:
    return [getattr(one.request, "name", "") for one in queue.ready]


@settings(deadline=None)
@given(st.permutations(range(1, 9)))
def test_ready_is_always_the_contiguous_prefix_in_order(arrivals: list[int]) -> None:
    queue, arrived = new_queue(), set[int]()
    for number in arrivals:
        accept(queue, future(str(number)), number, b"")
        arrived.add(number)
        prefix = next(n for n in range(1, 10) if n not in arrived)
        assert names(queue) == ["create", *map(str, range(1, prefix))]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["numbered", "plain"]), max_size=12), st.randoms(use_true_random=False))
def test_a_command_without_a_number_stays_behind_the_prefix_it_found(kinds: list[str], random: object) -> None:
    numbers = list(range(1, kinds.count("numbered") + 1))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    queue, bounds = new_queue(), dict[str, int]()
    for index, kind in enumerate(kinds):
        if kind == "plain":
            bounds[f"plain{index}"] = queue.contiguous
            accept(queue, future(f"plain{index}"), None, b"")
        else:
            number = numbers.pop()
            accept(queue, future(str(number)), number, b"")
    order = names(queue)[1:]
    for plain, bound in bounds.items():
        before = [name for name in order[: order.index(plain)] if not name.startswith("plain")]
        assert before == [str(number) for number in range(1, bound + 1)]


def test_a_retry_is_known_and_another_content_is_not() -> None:
    queue = new_queue()
    first = future("one")
    assert queue.known(1, b"print") is None
    accept(queue, first, 1, b"print")
    assert queue.known(1, b"print") == first.request_id
    with pytest.raises(SequenceConflict):
        queue.known(1, b"other")
    for impossible in (-1, 2**31):
        with pytest.raises(InvalidRequest):
            queue.known(impossible, b"print")


def test_numbers_whose_content_is_forgotten_are_refused_and_those_ahead_are_kept() -> None:
    queue, early = new_queue(), future("three")
    accept(queue, future("one"), 1, b"print")
    accept(queue, early, 3, b"ahead")
    queue.forget_numbers()
    for spent in (0, 1):
        with pytest.raises(SequenceConflict):
            queue.known(spent, b"print")
    assert queue.known(2, b"next") is None
    assert queue.known(3, b"ahead") == early.request_id


def test_recent_numbers_are_remembered_and_old_ones_refused() -> None:
    queue = new_queue()
    last = REMEMBERED + 10
    for number in range(1, last + 1):
        accept(queue, future("x"), number, b"print")
        queue.ready.clear()
        queue.model.pending = 0
    assert queue.known(last, b"print") is not None
    assert queue.known(last - REMEMBERED + 1, b"print") is not None
    with pytest.raises(SequenceConflict):
        queue.known(1, b"print")
    assert queue.known(last + 1, b"print") is None


def test_what_still_waits_is_remembered_however_much_it_is() -> None:
    queue = new_queue()
    for number in range(2, 2 * REMEMBERED):
        accept(queue, future("x"), number, b"print")
    assert queue.known(2, b"print") is not None
    assert names(queue) == ["create"]
    accept(queue, future("x"), 1, b"print")
    assert queue.contiguous == 2 * REMEMBERED - 1
    assert queue.known(2, b"print") is not None


def test_keys_belong_to_a_tenant() -> None:
    keys = KeyBook()
    keys.accept("alice", "k", "future-1", b"print")
    assert keys.known("alice", "k", b"print") == "future-1"
    assert keys.known("bob", "k", b"other") is None
    with pytest.raises(SequenceConflict):
        keys.known("alice", "k", b"other")
    for number in range(REMEMBERED):
        keys.accept("alice", str(number), "future", b"print")
    assert keys.known("alice", "k", b"other") is None
