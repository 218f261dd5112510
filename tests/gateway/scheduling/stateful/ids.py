"""Ids that are drawn anew in every program, and in the same program are the same every time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainer_cell.vault import ulid

_DRAWN_BY = ("gateway.scheduling.identity", "gateway.scheduling.new_models", "trainer_cell.vault.ulid")


class Ids:
    """Has what modules take from `secrets`, so that it can stand in for it."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def token_hex(self, num_bytes: int) -> str:
        return self._chance.randbytes(num_bytes).hex()

    def randbits(self, num_bits: int) -> int:
        return self._chance.getrandbits(num_bits)

    @contextmanager
    def given_to_all(self) -> Iterator[None]:
        """Within the block it is what the gateway and the vault make ids of."""
        with pytest.MonkeyPatch.context() as patch:
            for module in _DRAWN_BY:
                patch.setattr(f"{module}.secrets", self)
            patch.setattr("trainer_cell.vault.ulid._sequence", ulid._Sequence())
            yield
