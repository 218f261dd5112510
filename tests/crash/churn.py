"""Saves, overwrites and deletes without end, under several names at once, and a book of what was acknowledged.

Every line of the book is one write to a file, which a SIGKILL does not take back.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.workload import Pending, State, Violation, save
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import CheckpointExists
from trainer_cell.vault.layout import CheckpointAddress, Vault

# Of each thread its own, so that its order is known; two threads share each model, and its lock.
OF_THREADS = [
    [CheckpointAddress(f"s-{thread // 2}:train:0", kind, f"n{thread}") for kind in ("weights", "sampler_weights")]
    for thread in range(4)
]
ADDRESSES = [address for addresses in OF_THREADS for address in addresses]


def churn(vault: Vault, book: Path, epoch: str, seed: int) -> None:
    descriptor = os.open(book, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with vault.hold_epoch(epoch):
        threads = [
            threading.Thread(target=_churn, args=(vault, descriptor, epoch, seed * 100 + number, addresses))
            for number, addresses in enumerate(OF_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _churn(vault: Vault, book: int, epoch: str, seed: int, addresses: list[CheckpointAddress]) -> None:
    chance = random.Random(seed)
    for number in itertools.count(seed * 1000):
        address = chance.choice(addresses)
        command, overwrite = f"c-{number}", chance.random() < 0.8
        what = "delete" if chance.random() < 0.15 else "save"
        entry = {"address": address.uri, "seed": number, "what": what, "overwrite": overwrite}
        _enter(book, entry, "begun")
        try:
            if what == "delete":
                delete_checkpoint(vault, address)
            else:
                shards = chance.choice((1, 2))
                save(vault, number, address, overwrite=overwrite, shards=shards, command=command, epoch=epoch)
        except CheckpointExists:
            _enter(book, entry, "refused")
        else:
            _enter(book, entry, "done")


def _enter(book: int, entry: dict[str, object], how: str) -> None:
    os.write(book, json.dumps({**entry, "how": how}).encode() + b"\n")


@dataclass
class Oracle:
    """states: what was acknowledged last. pending: begun and not answered, the seed None for a delete."""

    states: dict[CheckpointAddress, State] = field(default_factory=lambda: dict.fromkeys(ADDRESSES))
    pending: dict[CheckpointAddress, State] = field(default_factory=dict)
    saves: list[Pending] = field(default_factory=list)
    answers: int = 0

    def read(self, lines: Iterable[str]) -> None:
        """The book of one process."""
        self.pending, begun = {}, {}
        for line in lines:
            entry = json.loads(line)
            address = CheckpointAddress.parse(entry["address"])
            state = entry["seed"] if entry["what"] == "save" else None
            if entry["how"] == "begun":
                self.pending[address], begun[address] = state, entry
                continue
            self.answers += 1
            del self.pending[address]
            if entry["how"] == "done":
                if entry["what"] == "save" and not entry["overwrite"] and self.states[address] is not None:
                    raise Violation(f"{address.uri} was not to be overwritten, and was")
                self.states[address] = state
            elif self.states[address] is None:
                raise Violation(f"{address.uri} was refused as taken, and was free")
        self.saves = [
            Pending(address, seed, begun[address]["overwrite"], f"c-{seed}")
            for address, seed in self.pending.items()
            if seed is not None
        ]

    def allowed(self) -> dict[CheckpointAddress, frozenset[State]]:
        return {address: frozenset({state, self.pending.get(address, state)}) for address, state in self.states.items()}
