"""Put on PYTHONPATH of a service under test: makes one rank's calls to the file system fail while a fault file asks.

The fault file holds `{"rank": r, "operation": "fsync", "error": "EIO"}`; an error that is no errno is raised as
`RuntimeError`, which is what a bug in the writing code would look like. Only calls on staging directories fail.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer_cell.vault.disk import Disk

T = TypeVar("T")

_FAULT_FILE = Path(os.environ["CELLGATE_TEST_FAULT_FILE"])
_call = Disk.call


def _faulty_call(self: Disk, operation: str, path: Path, act: Callable[[], T]) -> T:
    return _call(self, operation, path, lambda: _act(operation, path, act))


def _act(operation: str, path: Path, act: Callable[[], T]) -> T:
    if "RANK" in os.environ and ".staging" in path.parts and _FAULT_FILE.exists():
        fault = json.loads(_FAULT_FILE.read_text())
        if int(os.environ["RANK"]) == fault["rank"] and operation == fault["operation"]:
            number = getattr(errno, fault["error"], None)
            raise OSError(number, os.strerror(number)) if number else RuntimeError(fault["error"])
    return act()


Disk.call = _faulty_call  # type: ignore[method-assign]
