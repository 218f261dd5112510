"""What scheduling refuses at the door, as a tree; nothing is queued and no model is touched.

Exceptions know no HTTP: `gateway.http.errors` holds the one table that gives each class its status.

    Refused
      NotFound
        UnknownSession · UnknownModel · UnknownFuture · UnknownCheckpoint
      ImportNotAllowed
      InvalidRequest
        CheckpointUnreadable
          CheckpointUnsupported
        CheckpointPinned
      SequenceConflict
      QueueFull
      Stopping
      Unavailable
"""

from __future__ import annotations


class Refused(Exception):
    """An answer at the door."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotFound(Refused):
    """No such object for this tenant; another tenant's object gives the very same answer."""


class UnknownSession(NotFound):
    pass


class UnknownModel(NotFound):
    pass


class UnknownFuture(NotFound):
    pass


class UnknownCheckpoint(NotFound):
    pass


class InvalidRequest(Refused):
    """The request cannot be understood or names something impossible."""


class ImportNotAllowed(Refused):
    """The operator does not let this path be imported from; whether anything is there is not told."""


class SequenceConflict(Refused):
    """The same sequence number (or idempotency key) came again with another content."""


class QueueFull(Refused):
    """The tenant has too much waiting; to be tried again later."""


class Stopping(Refused):
    """The gateway is going down; to be tried again later."""


class Unavailable(Refused):
    """The journal cannot be written just now, so nothing can be accepted; to be tried again later."""


class CheckpointUnreadable(InvalidRequest):
    """The caller's own checkpoint is there, but its files are damaged."""


class CheckpointUnsupported(CheckpointUnreadable):
    """The caller's own checkpoint is there, but of a format version this gateway does not know."""


class CheckpointPinned(InvalidRequest):
    """The checkpoint is pinned, so it is not deleted."""
