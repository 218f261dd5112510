"""What the programs would find if a guard were missing: each is taken away in turn, and they find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings

from gateway.scheduling.cell_epoch import CellEpoch
from gateway.scheduling.futures import FutureBook
from gateway.scheduling.gradient_window import GradientWindow
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.turns import Turns
from gateway.store.journal import Journal
from tests.gateway.scheduling.stateful.drawn import SETTINGS, run_programs

Patch = pytest.MonkeyPatch


def retries_are_new(patch: Patch) -> None:
    known = ModelQueue.known

    def known_creates(self: ModelQueue, seq_id: int, fingerprint: bytes) -> str | None:
        return known(self, seq_id, fingerprint) if seq_id == 0 else None

    patch.setattr(ModelQueue, "known", known_creates)


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


# Each with what the programs say when they find it: that something else goes wrong is no proof.
_QUICK: dict[Callable[[Patch], None], str] = {
    # It gets an id, a row and so a place of its own; or none, since there is a row of that number.
    retries_are_new: r"a retry got another request id|what was accepted is refused when it comes again|^turns \[None",
    contents_are_not_compared: "another content under the same number was accepted",
    numbers_run_as_they_come: "was not run in order: ",
    accepted_before_it_is_durable: "^accepted .* is in the journal: False|^what was accepted is not known: ",
    steps_on_what_there_is: "a step on a partial gradient",
    what_was_lost_is_not_tried_again: r"not answered: .* accepted \('running', ",
    gaps_are_for_ever: r"not answered: .* accepted \('queued', ",
    answers_are_forgotten: "what was accepted is not known: ",
    tellings_are_not_on_record: "was told in life .*: not on record",
    those_held_are_forgotten: r"not answered: .* accepted \('queued', ",
}
_RARE: dict[Callable[[Patch], None], str] = {
    refused_numbers_are_spent: "what was accepted is not known: ",
    outcomes_are_not_heard: "was told .* instead of ",
    answered_before_it_is_durable: "an answer that was told is gone|^was told .*, now |was told .* instead of ",
    slots_are_kept_however_far_they_are: r"was told .* instead of |:train:\d+: \{'weight'",
    places_of_saves_are_not_on_record: "turns ",
    snapshots_run_ahead_of_the_journal: (
        r"was told .* instead of |cannot be used: |:train:\d+: \{'weight'|model_lost.* after \d+ losses"
    ),
}


def find(max_examples: int) -> None:
    chosen = settings(SETTINGS, max_examples=max_examples, derandomize=True, phases=[Phase.generate], print_blob=False)
    # Of the first that is found nothing is sought again.
    run_programs(settings(chosen, report_multiple_bugs=False))


@pytest.mark.parametrize("broken", _QUICK, ids=lambda broken: broken.__name__)
def test_what_is_broken_is_found(monkeypatch: Patch, broken: Callable[[Patch], None]) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=_QUICK[broken]):
        find(200)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broken", _RARE, ids=lambda broken: broken.__name__)
def test_what_is_rarely_met_is_found_too(monkeypatch: Patch, broken: Callable[[Patch], None]) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=_RARE[broken]):
        find(3000)
