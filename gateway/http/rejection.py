"""A request whose turn could be read but whose content is wrong: accepted, and fails at its place in the order.

The client counts its number as used whatever the answer is, so a refusal at the door would leave a hole that blocks
everything after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.requests import RejectedRequest
from trainer_cell.protocol.errors import ErrorKind

RequestT = TypeVar("RequestT")


def or_rejected(operation: str, build: Callable[[], RequestT]) -> RequestT | RejectedRequest:
    """What `build` gives, or the rejection that tells why it could not."""
    try:
        return build()
    except InvalidRequest as refusal:
        return RejectedRequest(operation=operation, kind=ErrorKind.BAD_COMMAND, message=refusal.message)
