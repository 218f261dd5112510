"""What the programs would find if a guard were missing: each is taken away in turn, and they find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from gateway.scheduling.cell_epoch import CellEpoch
from gateway.scheduling.futures import FutureBook
from gateway.scheduling.gradient_window import GradientWindow
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.turns import Turns
from gateway.store.journal import Journal
from tests.gateway.scheduling.stateful.machine import Programs
from tests.gateway.scheduling.stateful.test_programs import SETTINGS

Patch = pytest.MonkeyPatch


def retries_are_new(patch: Patch) -> None:
    patch.setattr(ModelQueue, "known", lambda self, seq_id, fingerprint: None)


def contents_are_not_compared(patch: Patch) -> None:
    known = ModelQueue.known

    def known_by_number(self: ModelQueue, seq_id: int, fingerprint: bytes) -> str | None:
        accepted = self._numbers.get(seq_id)
        return known(self, seq_id, accepted.fingerprint if accepted is not None else fingerprint)

    patch.setattr(ModelQueue, "known", known_by_number)


def numbers_run_as_they_come(patch: Patch) -> None:
    patch.setattr(ModelQueue, "place", lambda self, future, seq_id: self.ready.append(future))


def accepted_before_it_is_durable(patch: Patch) -> None:
    accept = Journal.accept

    def at_once(self: Journal, command: Any, model: Any, on_durable: Callable[[], None], on_failed: Any) -> None:
        accept(self, command, model, lambda: None, lambda why: None)
        on_durable()

    patch.setattr(Journal, "accept", at_once)


def answered_before_it_is_durable(patch: Patch) -> None:
    complete: Callable[..., None] = Journal.complete

    def at_once(self: Journal, *facts: Any) -> None:
        *others, on_durable = facts
        complete(self, *others, lambda: None)
        on_durable()

    patch.setattr(Journal, "complete", at_once)


def places_of_saves_are_not_on_record(patch: Patch) -> None:
    patch.setattr(Journal, "note_turn", lambda self, request_id, turn: None)


def tellings_are_not_on_record(patch: Patch) -> None:
    patch.setattr(Journal, "note_told", lambda self, request_id, moment, told: None)


def slots_are_kept_however_far_they_are(patch: Patch) -> None:
    patch.setattr(CellEpoch, "_agrees", lambda self, resident, hello: resident.model_id in self._queues)


def outcomes_are_not_heard(patch: Patch) -> None:
    patch.setattr(CellEpoch, "_hear", lambda self, outcome, hello, captured: None)


def steps_on_what_there_is(patch: Patch) -> None:
    patch.setattr(GradientWindow, "is_partial_for", lambda self, step: False)


def those_held_are_forgotten(patch: Patch) -> None:
    end = Publications.end

    def end_alone(self: Publications, model_id: str) -> list[ModelQueue]:
        end(self, model_id)
        return []

    patch.setattr(Publications, "end", end_alone)


def what_was_lost_is_not_tried_again(patch: Patch) -> None:
    def drop(self: Turns, queue: ModelQueue, future: Any) -> None:
        queue.running = None

    patch.setattr(Turns, "put_back", drop)


def refused_numbers_are_spent(patch: Patch) -> None:
    patch.setattr(ModelQueue, "withdraw", lambda self, seq_id: None)


def gaps_are_for_ever(patch: Patch) -> None:
    patch.setattr("gateway.scheduling.upkeep.Upkeep._seal_gaps", lambda self, passed_s: None)


def answers_are_forgotten(patch: Patch) -> None:
    patch.setattr(FutureBook, "remember", lambda self, future: None)


def snapshots_run_ahead_of_the_journal(patch: Patch) -> None:
    patch.setattr(Journal, "when_written", lambda self, on_durable: on_durable())


_QUICK = [
    retries_are_new,
    contents_are_not_compared,
    numbers_run_as_they_come,
    accepted_before_it_is_durable,
    steps_on_what_there_is,
    what_was_lost_is_not_tried_again,
    refused_numbers_are_spent,
    gaps_are_for_ever,
    answers_are_forgotten,
]
_RARE = [
    answered_before_it_is_durable,
    slots_are_kept_however_far_they_are,
    places_of_saves_are_not_on_record,
    tellings_are_not_on_record,
    outcomes_are_not_heard,
    those_held_are_forgotten,
    snapshots_run_ahead_of_the_journal,
]


def find(max_examples: int) -> None:
    chosen = settings(SETTINGS, max_examples=max_examples, derandomize=True, phases=[Phase.generate], print_blob=False)
    run_state_machine_as_test(Programs, settings=chosen)


# Beside the programs whose worth they show.
@pytest.mark.full
@pytest.mark.parametrize("broken", _QUICK, ids=lambda broken: broken.__name__)
def test_what_is_broken_is_found(monkeypatch: Patch, broken: Callable[[Patch], None]) -> None:
    broken(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - however it shows
        find(200)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broken", _RARE, ids=lambda broken: broken.__name__)
def test_what_is_rarely_met_is_found_too(monkeypatch: Patch, broken: Callable[[Patch], None]) -> None:
    broken(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        find(3000)
