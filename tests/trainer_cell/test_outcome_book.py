"""What a cell remembers until its gateway has it."""

from __future__ import annotations

import time
from typing import get_args

import msgspec
import pytest

from trainer_cell.outcome_book import OutcomeBook, Receipt
from trainer_cell.protocol.commands import (
    Acknowledge,
    AdamParams,
    Array,
    Command,
    Datum,
    ForwardBackward,
    OptimStep,
    SaveState,
    Tick,
    decode_command,
    encode_command,
)
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import (
    BaseModel,
    Failed,
    Hello,
    Layout,
    OptimStepDone,
    Outcome,
    Progress,
    StateSaved,
)

BASE = BaseModel("cellgate/tiny", ("tiny",), "ab" * 16, None, 512, 2048)
HELLO = Hello(3, "epoch", Layout(1, 1, 1, 1), BASE, "fp32", True, False, False, 1, 8, ())
NEW = Receipt(is_to_run=True)
IGNORED = Receipt(is_to_run=False)


def step(command_id: str) -> bytes:
    return encode_command(OptimStep(command_id, "model", AdamParams(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0)))


def save(command_id: str) -> bytes:
    created = "2026-01-01T00:00:00Z"
    return encode_command(SaveState(command_id, "model", "n", "weights", False, True, "t", created, None, {}))


def acknowledge(*command_ids: str) -> bytes:
    return encode_command(Acknowledge(command_ids))


def done(command_id: str) -> OptimStepDone:
    return OptimStepDone(command_id, 1, 1, {})


def saved(command_id: str) -> StateSaved:
    return StateSaved(command_id, "v", 1, 1, True, 8)


def told(book: OutcomeBook) -> tuple[tuple[Outcome, ...], tuple[str, ...]]:
    hello = book.told_in(HELLO)
    return hello.outcomes, hello.publishing


def test_outcomes_are_told_in_the_order_in_which_they_were_said_until_they_are_acknowledged() -> None:
    book = OutcomeBook()
    failed = Failed("a", ErrorKind.NO_GRADIENTS, "none")
    for command_id, outcome in (("b", done("b")), ("a", failed), ("c", done("c"))):
        assert book.receive(step(command_id)) == NEW
        book.note(outcome)
    assert told(book) == ((done("b"), failed, done("c")), ())
    assert book.receive(acknowledge("a", "never heard of")) == IGNORED
    assert told(book) == ((done("b"), done("c")), ())
    book.receive(acknowledge("b", "c"))
    assert told(book) == ((), ())


def test_a_command_that_comes_again_is_answered_while_its_outcome_is_remembered_and_only_then() -> None:
    book = OutcomeBook()
    assert book.receive(step("a")) == NEW
    book.note(done("a"))
    assert book.receive(step("a")) == Receipt(is_to_run=False, answer=done("a"))
    book.receive(acknowledge("a"))
    assert book.receive(step("a")) == NEW


def test_a_save_is_being_published_from_its_capture_to_its_outcome() -> None:
    book = OutcomeBook()
    book.receive(save("s"))
    book.note(Progress("s", "capturing", 0, 8))
    assert told(book) == ((), ())
    book.note(Progress("s", "writing", 0, 8))
    assert told(book) == ((), ("s",))
    assert book.receive(save("s")) == IGNORED
    assert book.receive(step("a")) == NEW
    book.note(done("a"))
    book.note(Progress("s", "publishing", 8, 8))
    book.note(saved("s"))
    assert told(book) == ((done("a"), saved("s")), ())


def test_what_a_save_tells_after_it_was_given_up_on_begins_nothing() -> None:
    book = OutcomeBook()
    book.receive(save("s"))
    book.note(Progress("s", "writing", 0, 8))
    book.note(Failed("s", ErrorKind.DEADLINE_EXCEEDED, "late"))
    book.receive(acknowledge("s"))
    book.note(Progress("s", "writing", 8, 8))
    assert told(book) == ((), ())


def test_no_memory_is_kept_of_what_was_acknowledged() -> None:
    book = OutcomeBook()
    for number in range(1000):
        command_id = str(number)
        book.receive(save(command_id))
        book.note(Progress(command_id, "writing", 0, 8))
        book.note(saved(command_id))
        book.receive(acknowledge(command_id))
    assert [len(held) for held in (vars(book)["_outcomes"], vars(book)["_publishing"])] == [0, 0]


def test_what_has_no_id_is_always_new() -> None:
    book = OutcomeBook()
    assert [book.receive(encode_command(Tick())) for _ in range(2)] == [NEW, NEW]


def test_a_frame_that_is_no_command_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        OutcomeBook().receive(b"no command")


def test_a_large_command_is_looked_at_in_a_fraction_of_the_time_that_decoding_takes() -> None:
    inputs = {
        "target_tokens": Array("int64", (4096,), bytes(8 * 4096)),
        "weights": Array("float32", (4096,), bytes(16384)),
    }
    data = tuple(Datum(bytes(4 * 4096), inputs) for _ in range(256))
    frame = encode_command(ForwardBackward("a", "model", data, "cross_entropy", {}, False))
    book = OutcomeBook()

    def looking_s(look: object) -> float:
        began = time.perf_counter()
        assert callable(look)
        look(frame)
        return time.perf_counter() - began

    assert min(looking_s(book.receive) for _ in range(9)) < 0.2 * min(looking_s(decode_command) for _ in range(9))


def test_every_command_but_those_without_an_answer_has_an_id_by_which_it_is_known() -> None:
    with_id = {kind for kind in get_args(Command) if "command_id" in kind.__struct_fields__}
    assert {kind.__name__ for kind in set(get_args(Command)) - with_id} == {"Acknowledge", "Tick", "Stop"}
