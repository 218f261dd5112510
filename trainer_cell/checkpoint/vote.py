"""How the ranks hear of each other in an attempt to save, without a collective: through a key-value store.

Rank 0 announces where the attempt is staged, and every other rank votes on its shard. A barrier says "arrived", not
"succeeded", and can pair with the barrier of the next save; a key holds its attempt's name, so it can speak for no
other. What does not come before its deadline is a no.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch.distributed as dist

from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.ranks import Ranks, Verdict
from trainer_cell.vault.manifest import FileRecord


class Vote(msgspec.Struct, frozen=True):
    """What one rank has to say of its part of an attempt; `record` is None when it had nothing to write, or failed.

    is_finite: neither NaN nor infinity is in it.
    """

    verdict: Verdict
    record: FileRecord | None
    is_finite: bool = True


class _Announcement(msgspec.Struct, frozen=True):
    token: str | None


class Booth:
    """One connection to the store, for one attempt at a time: a wait on a connection blocks all else on it."""

    def __init__(self, store: dist.TCPStore, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks

    def announce(self, attempt: str, token: str | None) -> None:
        """On rank 0: the attempt's staging token; None when it has none and is over."""
        if self._ranks.world > 1:
            self._store.set(_place(attempt), msgspec.msgpack.encode(_Announcement(token)))

    def announced(self, attempt: str, timeout_s: float) -> str | None:
        """The attempt's token; None when there is nothing to write, or nothing was said within `timeout_s`."""
        said = self._await(_place(attempt), timeout_s)
        return None if said is None else msgspec.msgpack.decode(said, type=_Announcement).token

    def cast(self, attempt: str, vote: Vote) -> None:
        """Make this rank's vote known to rank 0."""
        self._store.set(_ballot(attempt, self._ranks.rank), msgspec.msgpack.encode(vote))

    def collect(self, attempt: str, own: Vote, timeout_s: float) -> list[Vote]:
        """On rank 0: every rank's vote, in rank order. Those that do not come within `timeout_s` are noes. Afterwards
        the store holds nothing of the attempt."""
        if self._ranks.world == 1:
            return [own]
        votes = [own]
        for rank in range(1, self._ranks.world):
            key = _ballot(attempt, rank)
            said = self._await(key, timeout_s)
            if said is None:
                missing = Verdict(ErrorKind.DEADLINE_EXCEEDED, f"no vote on the save within {timeout_s:.0f} s")
                votes.append(Vote(missing, None))
                continue
            votes.append(msgspec.msgpack.decode(said, type=Vote))
            self._store.delete_key(key)
        self._store.delete_key(_place(attempt))
        return votes

    def _await(self, key: str, timeout_s: float) -> bytes | None:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            return None
        return bytes(self._store.get(key))


def _place(attempt: str) -> str:
    return f"place/{attempt}"


def _ballot(attempt: str, rank: int) -> str:
    return f"vote/{attempt}/{rank}"


class BallotBox:
    """One store for all attempts of a cell; every rank holds as many connections to it as it has attempts at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._lock = threading.Lock()
        self._idle: list[Booth] = []
        if ranks.is_first:
            self._server = self._connect(0, is_master=True)
        self._port = ranks.first(lambda: self._server.port)

    @contextmanager
    def booth(self) -> Iterator[Booth]:
        """A connection of one's own, made if none is idle."""
        with self._lock:
            booth = self._idle.pop() if self._idle else None
        if booth is None:
            booth = Booth(self._connect(self._port, is_master=False), self._ranks)
        yield booth
        # Not one that an error has left in an unknown state.
        with self._lock:
            self._idle.append(booth)

    def _connect(self, port: int, is_master: bool) -> dist.TCPStore:
        return dist.TCPStore(
            self._host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(minutes=5)
        )


def noes(votes: Sequence[Vote]) -> list[tuple[int, Verdict]]:
    """The ranks that say no, and why."""
    return [(rank, vote.verdict) for rank, vote in enumerate(votes) if vote.verdict.kind is not None]
