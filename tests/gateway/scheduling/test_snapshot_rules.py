"""When a snapshot is due, to the step, the byte and the second."""

from __future__ import annotations

import time

from gateway.scheduling.history import RETRY_S, Change, History, Snapshot, What
from gateway.scheduling.snapshot_rules import SnapshotRules

RULES = SnapshotRules(steps=3, payload_bytes=1000, seconds=60.0)


def history(*what: What, payload_bytes: int = 0) -> History:
    """After a snapshot of turn 0."""
    made = History(Snapshot("version", 0))
    for turn, one in enumerate(what, 1):
        made.note(Change(turn, one, payload_bytes=payload_bytes if one == "forward_backward" else 0))
    return made


def is_due(of: History, after_s: float = 0.0) -> bool:
    return RULES.is_due(of, time.monotonic() + after_s)


def test_so_many_steps_are_enough_and_one_less_is_not() -> None:
    assert not is_due(history("optim_step", "optim_step"))
    assert is_due(history("optim_step", "optim_step", "optim_step"))


def test_so_many_bytes_are_enough_and_one_less_is_not() -> None:
    assert is_due(history("forward_backward", "forward_backward", "optim_step", payload_bytes=500))
    assert not is_due(history("forward_backward", "optim_step", payload_bytes=999))


def test_so_many_seconds_after_the_first_step_are_enough() -> None:
    stepped = history("forward_backward", "optim_step")
    assert not is_due(stepped, 59.0)
    assert is_due(stepped, 61.0)


def test_after_a_load_it_is_due_at_once() -> None:
    assert is_due(history("load"))


def test_it_is_not_due_while_a_gradient_is_open_or_when_nothing_happened() -> None:
    assert not is_due(history("optim_step", "optim_step", "optim_step", "forward_backward"), 100.0)
    assert not is_due(history(), 100.0)


def test_after_one_that_failed_another_is_due_only_later() -> None:
    stepped = history("optim_step", "optim_step", "optim_step")
    stepped.note_no_snapshot()
    assert not is_due(stepped, RETRY_S - 1)
    assert is_due(stepped, RETRY_S + 1)


def test_what_a_snapshot_holds_is_not_noted_and_no_reason_for_another() -> None:
    stepped = history("optim_step", "optim_step", "optim_step")
    stepped.cover(Snapshot("later", 3))
    stepped.note(Change(3, "optim_step"))
    assert (stepped.changes, stepped.last_turn, stepped.dirty_since_s) == ([], 3, None)
    assert not is_due(stepped, 100.0)
