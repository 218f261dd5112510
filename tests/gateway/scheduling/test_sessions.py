"""Sessions: open, beat, finish, and when their models may give way."""

from __future__ import annotations

import pytest

from gateway.scheduling.errors import UnknownSession
from gateway.scheduling.sessions import SessionBook


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_finishing_is_idempotent_and_the_first_reason_stays() -> None:
    book = SessionBook()
    session = book.open("alice")
    book.finish("alice", session.session_id, "errored", "boom")
    book.finish("alice", session.session_id, "success")
    assert (session.finish_reason, session.finish_detail) == ("errored", "boom")


def test_a_finished_session_still_answers_its_heartbeats() -> None:
    book = SessionBook()
    session = book.open("alice")
    book.finish("alice", session.session_id, "success")
    assert book.beat("alice", session.session_id) is session
    with pytest.raises(UnknownSession):
        book.beat("alice", "never known")


def test_an_id_can_go_into_urls_and_model_ids() -> None:
    ids = {SessionBook().open("alice").session_id for _ in range(100)}
    assert len(ids) == 100
    assert all(session_id.isalnum() for session_id in ids)


def test_sessions_are_listed_newest_first_for_their_tenant() -> None:
    book = SessionBook()
    first, second = book.open("alice"), book.open("alice")
    book.open("bob")
    assert book.list("alice") == [second, first]


def test_a_session_that_beats_is_silent_when_it_has_long_not_beaten() -> None:
    clock = Clock()
    book = SessionBook(now=clock)
    beating, silent = book.open("alice"), book.open("alice")
    book.open("alice", beats=False)
    for _ in range(30):
        clock.now += 10
        book.beat("alice", beating.session_id)
    assert book.silent(120) == [silent]
