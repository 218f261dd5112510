"""How rank 0 learns that every shard of an attempt is on disk: votes through a key-value store, never a barrier.

A barrier says "arrived", not "succeeded", and can pair with the barrier of the next save. A vote is a key that holds
its attempt's token, so it can speak for no other attempt; a vote that does not come before the deadline is a no.
"""

from __future__ import annotations

import os
from datetime import timedelta

import msgspec
import torch.distributed as dist

from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.ranks import Ranks, Verdict
from trainer_cell.vault.shard_file import WrittenShard


class Vote(msgspec.Struct, frozen=True):
    """What one rank has to say of its part of an attempt; `shard` is None when it had nothing to write, or failed."""

    verdict: Verdict
    shard: WrittenShard | None


class BallotBox:
    """One store for the votes of all attempts; every rank holds a connection of its own to it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(minutes=5)
        if ranks.is_first:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = ranks.first(lambda: self._store.port)
        if not ranks.is_first:
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def cast(self, token: str, vote: Vote) -> None:
        """Make this rank's vote on the attempt `token` known to rank 0."""
        self._store.set(self._key(token, self._ranks.rank), msgspec.msgpack.encode(vote))

    def collect(self, token: str, own: Vote, timeout_s: float) -> list[Vote]:
        """On rank 0: every rank's vote, in rank order. Those that do not come within `timeout_s` are noes."""
        votes = [own]
        for rank in range(1, self._ranks.world):
            key = self._key(token, rank)
            try:
                self._store.wait([key], timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                missing = Verdict(ErrorKind.DEADLINE_EXCEEDED, f"no vote on the save within {timeout_s:.0f} s")
                votes.append(Vote(missing, None))
                continue
            votes.append(msgspec.msgpack.decode(self._store.get(key), type=Vote))
            self._store.delete_key(key)
        return votes

    @staticmethod
    def _key(token: str, rank: int) -> str:
        return f"vote/{token}/{rank}"
