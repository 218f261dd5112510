"""All ranks of one cell: the same bytes to everyone, and one verdict from everyone.

Control traffic goes over a gloo group of its own, so that it never pairs with a collective of the training code.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from trainer_cell.protocol.errors import CommandFailed, ErrorKind

T = TypeVar("T")

# Bounds how much slower one rank may be than another inside a collective; ticks keep idle ranks well inside it.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Verdict(msgspec.Struct, frozen=True):
    """What one rank says of a step: no kind means it went well."""

    kind: ErrorKind | None
    message: str


_WELL = Verdict(None, "")


def attempt(step: Callable[[], T]) -> tuple[T | None, Verdict]:
    """Run `step` and turn whatever it raises into a verdict: the one place where a rank's error is caught."""
    try:
        return step(), _WELL
    except Exception as error:
        return None, _verdict_on(error)


class Ranks:
    """This process among the ranks of its cell. `torch.distributed` must be initialised before."""

    def __init__(self) -> None:
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, frame: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the other ranks pass None."""
        if self.world == 1:
            assert frame is not None
            return frame
        length = torch.tensor([len(frame) if frame is not None else 0], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        if frame is None:
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
        else:
            payload = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        return payload.numpy().tobytes() if frame is None else frame

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, step: Callable[[], T]) -> T:
        """Run `step` on this rank and return its value if it went well on every rank.

        Otherwise raise the same `CommandFailed` on every rank, naming the ranks at fault. `step` must hold no
        collective: a rank that raises before one would leave the others waiting in it.
        """
        value: Any
        value, verdict = attempt(step)
        failed = [(rank, said) for rank, said in enumerate(self.gather(verdict)) if said.kind is not None]
        if failed:
            raise one_failure(failed, self.world)
        return value  # type: ignore[no-any-return]

    def first(self, step: Callable[[], T]) -> T:
        """Run `step` on rank 0 alone and give its value, or its failure, to every rank."""
        said: list[Any] = [None]
        if self.is_first:
            said = [attempt(step)]
        if self.world > 1:
            dist.broadcast_object_list(said, src=0, group=self._group)
        value, verdict = said[0]
        if verdict.kind is not None:
            raise CommandFailed(verdict.kind, verdict.message)
        return value  # type: ignore[no-any-return]


def describe_os_error(error: OSError) -> str:
    """`ENOSPC: No space left on device`, without the path, which is nobody's business outside."""
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{name}: {os.strerror(error.errno)}" if error.errno else str(error)


def _verdict_on(error: Exception) -> Verdict:
    if isinstance(error, CommandFailed):
        return Verdict(error.kind, error.message)
    if isinstance(error, OSError):
        return Verdict(ErrorKind.STORAGE_FAILED, describe_os_error(error))
    return Verdict(ErrorKind.RANK_FAILED, f"{type(error).__name__}: {error}")


def one_failure(failed: list[tuple[int, Verdict]], world: int) -> CommandFailed:
    """One failure for all; a failure that every rank shares needs no rank named."""
    kind = failed[0][1].kind
    assert kind is not None
    messages = {said.message for _, said in failed}
    if len(failed) == world and len(messages) == 1:
        return CommandFailed(kind, failed[0][1].message)
    return CommandFailed(kind, "; ".join(f"rank {rank}: {said.message}" for rank, said in failed))
