"""Ids sort by when they were made, whatever the clock does."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer_cell.vault.ulid import ULID_PATTERN, new_ulid


def test_ids_of_one_process_rise_and_are_well_formed() -> None:
    ids = [new_ulid() for _ in range(2000)]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(ULID_PATTERN, ulid) for ulid in ids)


def test_ids_rise_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_ulid()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert new_ulid() > before


def test_an_id_comes_behind_the_one_it_is_made_after() -> None:
    future = "7" + "Z" * 9 + "0" * 16
    assert new_ulid(after=future) > future


def test_threads_never_make_the_same_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: new_ulid(), range(4000)))
    assert len(set(ids)) == len(ids)
