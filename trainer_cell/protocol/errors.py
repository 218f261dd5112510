"""How a command can fail.

`CommandFailed` is the terminal answer to a command. Its `kind` is the contract, its message is for people:
no caller may branch on the text. Every kind has one category, which says who can mend it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Category = Literal["user", "server"]


class ErrorKind(StrEnum):
    """Everything a command can fail of."""

    # The request, or what it names, is at fault.
    BAD_COMMAND = "bad_command"
    UNKNOWN_MODEL = "unknown_model"
    MODEL_EXISTS = "model_exists"
    CHECKPOINT_EXISTS = "checkpoint_exists"
    CHECKPOINT_NOT_FOUND = "checkpoint_not_found"
    CHECKPOINT_INCOMPATIBLE = "checkpoint_incompatible"
    NO_OPTIMIZER_STATE = "no_optimizer_state"
    NO_GRADIENTS = "no_gradients"
    PARTIAL_GRADIENTS = "partial_gradients"
    NO_FREE_SLOT = "no_free_slot"
    QUOTA_EXCEEDED = "quota_exceeded"
    # The service, its disk or its machines are at fault.
    MODEL_LOST = "model_lost"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    NON_FINITE_STATE = "non_finite_state"
    STORAGE_FAILED = "storage_failed"
    RANK_FAILED = "rank_failed"
    SAVE_BUFFERS_FULL = "save_buffers_full"
    CELL_LOST = "cell_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    OUT_OF_MEMORY = "out_of_memory"


_USER_KINDS = frozenset(
    {
        ErrorKind.BAD_COMMAND,
        ErrorKind.UNKNOWN_MODEL,
        ErrorKind.MODEL_EXISTS,
        ErrorKind.CHECKPOINT_EXISTS,
        ErrorKind.CHECKPOINT_NOT_FOUND,
        ErrorKind.CHECKPOINT_INCOMPATIBLE,
        ErrorKind.NO_OPTIMIZER_STATE,
        ErrorKind.NO_GRADIENTS,
        ErrorKind.PARTIAL_GRADIENTS,
        ErrorKind.NO_FREE_SLOT,
        ErrorKind.QUOTA_EXCEEDED,
    }
)


def category(kind: ErrorKind) -> Category:
    """Who can mend a failure of this kind: the caller (`user`) or the operator (`server`)."""
    return "user" if kind in _USER_KINDS else "server"


class CommandFailed(Exception):
    """The terminal answer of a command that did not succeed; model state is as it was before the command."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    @property
    def category(self) -> Category:
        return category(self.kind)

    def __repr__(self) -> str:
        return f"CommandFailed({self.kind.value}, {self.message!r})"
