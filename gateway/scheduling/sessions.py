"""Sessions: one client's visit, under which its models are made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from gateway.scheduling.errors import UnknownSession
from gateway.scheduling.identity import new_session_id

FinishReason = Literal["success", "errored", "interrupted"]


@dataclass
class Session:
    """last_sign_s: monotonic time of the last beat or command. finish_reason: None until the client said goodbye.

    beats: whether its client sends heartbeats; a session of the plain REST face has none and never counts as silent.
    """

    session_id: str
    tenant: str
    tags: tuple[str, ...]
    user_metadata: dict[str, str]
    sdk_version: str | None
    project_id: str | None
    display_name: str | None
    last_sign_s: float
    beats: bool = True
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    model_ids: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finish_detail: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


Sessions = list[Session]


class SessionBook:
    """All sessions. One that ended stays known: its heartbeats are answered, its models found."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sessions: dict[str, Session] = {}

    def open(
        self,
        tenant: str,
        tags: tuple[str, ...] = (),
        user_metadata: dict[str, Any] | None = None,
        sdk_version: str | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        beats: bool = True,
        session_id: str | None = None,
    ) -> Session:
        """Under an id of its own, unless one is given that no client can have."""
        session = Session(
            session_id=session_id or new_session_id(),
            tenant=tenant,
            tags=tuple(tags),
            user_metadata=dict(user_metadata or {}),
            sdk_version=sdk_version,
            project_id=project_id,
            display_name=display_name,
            last_sign_s=self._now(),
            beats=beats,
        )
        self._sessions[session.session_id] = session
        return session

    def remember(self, session: Session) -> None:
        """One of before this process."""
        self._sessions[session.session_id] = session

    def withdraw(self, session: Session) -> None:
        """It could not be journalled: nobody knows of it."""
        del self._sessions[session.session_id]

    def forget_model(self, session_id: str, model_id: str) -> None:
        """It never came to be."""
        self._sessions[session_id].model_ids.remove(model_id)

    def silent(self, silence_s: float) -> Sessions:
        """Those that have shown no sign of life for so long."""
        return [session for session in self._sessions.values() if self._is_silent(session, silence_s)]

    def _is_silent(self, session: Session, silence_s: float) -> bool:
        return session.beats and self._now() - session.last_sign_s > silence_s

    def find(self, session_id: str) -> Session | None:
        """Whoever's it is."""
        return self._sessions.get(session_id)

    def get(self, tenant: str, session_id: str) -> Session:
        """Raises `UnknownSession`, also for another tenant's."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise UnknownSession(f"no session {session_id}")
        return session

    def list(self, tenant: str) -> Sessions:
        """Newest first."""
        return [session for session in reversed(self._sessions.values()) if session.tenant == tenant]

    def beat(self, tenant: str, session_id: str) -> Session:
        """Note a sign of life, also of a finished session; raises `UnknownSession`."""
        session = self.get(tenant, session_id)
        session.last_sign_s = self._now()
        return session

    def finish(self, tenant: str, session_id: str, reason: FinishReason, detail: str | None = None) -> Session:
        """Mark the session ended: its models may lose their slots. The first reason stays; raises `UnknownSession`."""
        session = self.get(tenant, session_id)
        if not session.is_finished:
            session.finish_reason, session.finish_detail = reason, detail
        return session
