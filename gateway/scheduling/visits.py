"""Opening and finishing sessions, so that they last: a model must never be in a session that nobody remembers."""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.scheduling.durable import durable, durable_or_refused
from gateway.scheduling.errors import Unavailable
from gateway.scheduling.identity import new_session_id
from gateway.scheduling.journal_rows import session_record
from gateway.scheduling.sessions import FinishReason, Session, SessionBook
from gateway.store.journal import Journal

PLAIN_REST = "plain REST"
START_UP = "start-up"


class Visits:
    """plain_sessions: of the plain REST face, one for each tenant that has used it."""

    def __init__(self, sessions: SessionBook, journal: Journal) -> None:
        self.plain_sessions: dict[str, Session] = {}
        self._sessions = sessions
        self._journal = journal

    async def open(self, tenant: str, **facts: Any) -> Session:
        """As `SessionBook.open`, and in the journal. Raises `Unavailable`."""
        session = self._sessions.open(tenant, **facts)
        try:
            await durable_or_refused(partial(self._journal.open_session, session_record(session)))
        except Unavailable:
            self._sessions.withdraw(session)
            raise
        return session

    async def finish(self, tenant: str, session_id: str, reason: FinishReason, detail: str | None) -> Session:
        """As `SessionBook.finish`, and in the journal. Raises `UnknownSession`."""
        session = self._sessions.finish(tenant, session_id, reason, detail)
        await durable(partial(self._journal.finish_session, session_record(session)))
        return session

    def plain(self, tenant: str) -> Session:
        """The tenant's own, that has no client and never falls silent."""
        if tenant not in self.plain_sessions:
            self.plain_sessions[tenant] = self._open_at_once(tenant, PLAIN_REST, None)
        return self.plain_sessions[tenant]

    def start_up(self, tenant: str, session_id: str) -> Session:
        """For the models a service starts with; of that id, unless another tenant has it from an earlier start."""
        found = self._sessions.find(session_id)
        if found is not None and found.tenant == tenant:
            return found
        free_id = session_id if found is None else f"{session_id}-{new_session_id()}"
        return self._open_at_once(tenant, START_UP, free_id)

    def _open_at_once(self, tenant: str, display_name: str, session_id: str | None) -> Session:
        """What is made in it is journalled after it."""
        session = self._sessions.open(tenant, display_name=display_name, beats=False, session_id=session_id)
        self._journal.keep_session(session_record(session))
        return session
