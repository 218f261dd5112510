"""A model of what a power cut may leave, behind the vault's seam to the file system.

`PoweredDisk` does everything on a real directory and, after each call, notes what has changed there: so it asks
nothing of how the vault goes about it but that syncs go through `Disk.call` under the name of fsync. Of these changes
a disk holds for certain

- a file's bytes as they were at the last fsync of that file,
- a directory entry made, moved or removed, once a directory it concerns has been fsynced. A rename happens whole;

and what an fsync has failed to make so no later one makes so: the kernel holds it for written. Of everything else
anything may be there or not. `Log.image` is one of those disks, `Image.write` makes it real.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from trainer_cell.vault.disk import Disk

T = TypeVar("T")
Which = Callable[[Path], bool]

_SYNCS = ("fsync", "fdatasync")
_LOOKS_ONLY = ("stat", "list", "read", "readlink", "statvfs", "lock")
_ROOT = 0


@dataclass(frozen=True)
class Entry:
    """A name in a directory, as numbers of nodes."""

    directory: int
    name: str


@dataclass(frozen=True)
class Wrote:
    node: int
    data: bytes


@dataclass(frozen=True)
class Renamed:
    """`node` left `source` and is at `target` now; None where it has just been made, or is gone."""

    node: int
    source: Entry | None
    target: Entry | None

    @property
    def directories(self) -> set[int]:
        return {entry.directory for entry in (self.source, self.target) if entry is not None}


@dataclass(frozen=True)
class Synced:
    node: int


@dataclass(frozen=True)
class SyncFailed:
    node: int


@dataclass(frozen=True)
class Said:
    """What the process under test has told the world; it does nothing to the disk."""

    what: str


Change = Wrote | Renamed | Synced | SyncFailed | Said
Kind = Literal["file", "directory"] | str  # or where a symlink points: `-> target`
Strategy = Literal[
    "nothing unsynced", "everything", "names without data", "data without names", "names and some data",
    "part of the journal", "part of each directory", "anything",
]  # fmt: skip
STRATEGIES: tuple[Strategy, ...] = Strategy.__args__  # type: ignore[attr-defined]


@dataclass
class Log:
    changes: list[Change] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    # How many of the changes were there before the recording; a power cut keeps those.
    base: int = 0

    def said_before(self, at: int) -> list[str]:
        return [change.what for change in self.changes[:at] if isinstance(change, Said)]

    def image(self, at: int, strategy: Strategy, chance: random.Random) -> Image:
        """A disk after a power cut that follows the first `at` changes."""
        changes = self.changes[:at]
        entries: dict[int, dict[str, int]] = {_ROOT: {}}
        for change in _that_hold(changes, self.base, strategy, chance):
            if change.source and entries.get(change.source.directory, {}).get(change.source.name) == change.node:
                del entries[change.source.directory][change.source.name]
            if change.target:
                entries.setdefault(change.target.directory, {})[change.target.name] = change.node
        data = {
            node: _torn(durable, current, strategy, chance)
            for node, (durable, current) in _contents(changes, self.base).items()
        }
        return Image(self.kinds, entries, data)


def _that_hold(changes: Sequence[Change], base: int, strategy: Strategy, chance: random.Random) -> Iterator[Renamed]:
    """The changes of names that the disk has, in order."""
    renames = {index: change for index, change in enumerate(changes) if isinstance(change, Renamed)}
    durable = {index for index in renames if index < base} | _synced(changes)
    unsynced = [index for index in renames if index not in durable]
    kept = durable | _chosen(unsynced, changes, strategy, chance)
    return (change for index, change in renames.items() if index in kept)


def _synced(changes: Sequence[Change]) -> set[int]:
    """The changes of names that an fsync has made durable."""
    synced: set[int] = set()
    waiting: defaultdict[int, set[int]] = defaultdict(set)
    for index, change in enumerate(changes):
        if isinstance(change, Renamed):
            for node in change.directories:
                waiting[node].add(index)
        elif isinstance(change, Synced):
            synced |= waiting.pop(change.node, set())
        elif isinstance(change, SyncFailed):
            waiting.pop(change.node, None)
    return synced


def _chosen(unsynced: list[int], changes: Sequence[Change], strategy: Strategy, chance: random.Random) -> set[int]:
    if strategy in ("nothing unsynced", "data without names"):
        return set()
    if strategy in ("everything", "names without data", "names and some data"):
        return set(unsynced)
    if strategy == "part of the journal":
        return set(unsynced[: chance.randint(0, len(unsynced))])
    if strategy == "anything":
        return {index for index in unsynced if chance.random() < 0.5}
    of: dict[int, list[int]] = {}
    for index in unsynced:
        change = changes[index]
        assert isinstance(change, Renamed)
        for node in change.directories:
            of.setdefault(node, []).append(index)
    missed = {index for indices in of.values() for index in indices[chance.randint(0, len(indices)) :]}
    return set(unsynced) - missed


def _contents(changes: Sequence[Change], base: int) -> dict[int, tuple[bytes, bytes]]:
    """Of each file: its bytes at its last fsync, and now."""
    found: dict[int, tuple[bytes, bytes]] = {}
    failed: set[int] = set()
    for index, change in enumerate(changes):
        if isinstance(change, Wrote):
            durable, _ = found.get(change.node, (b"", b""))
            found[change.node] = (change.data if index < base else durable, change.data)
        elif isinstance(change, SyncFailed):
            failed.add(change.node)
        elif isinstance(change, Synced) and change.node in found and change.node not in failed:
            current = found[change.node][1]
            found[change.node] = (current, current)
    return found


def _torn(durable: bytes, current: bytes, strategy: Strategy, chance: random.Random) -> bytes:
    if strategy in ("nothing unsynced", "names without data") or durable == current:
        return durable
    if strategy in ("everything", "data without names"):
        return current
    zeros = durable + bytes(max(0, len(current) - len(durable)))
    cut = chance.randint(0, len(current))
    return chance.choice([durable, zeros, current, current[:cut], current[:cut] + zeros[cut:]])


@dataclass(frozen=True)
class Image:
    kinds: dict[int, Kind]
    entries: dict[int, dict[str, int]]
    data: dict[int, bytes]

    def tree(self) -> tuple[tuple[str, Kind | bytes], ...]:
        """Everything, by path; equal for disks that look the same."""
        return tuple(self._below(_ROOT, ""))

    def _below(self, directory: int, prefix: str) -> Iterator[tuple[str, Kind | bytes]]:
        for name, node in sorted(self.entries.get(directory, {}).items()):
            kind = self.kinds[node]
            yield prefix + name, self.data.get(node, b"") if kind == "file" else kind
            yield from self._below(node, f"{prefix}{name}/")

    def write(self, top: Path) -> None:
        """Into a new directory."""
        top.mkdir()
        for name, content in self.tree():
            path = top / name
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content == "directory":
                path.mkdir()
            else:
                path.symlink_to(content.removeprefix("-> "))


class PoweredDisk(Disk):
    """Records everything under `top`, whose present content counts as durable; syncs are recorded, not done.

    ignores: which syncs this disk only pretends to do; fails: which it fails, with EIO.
    """

    def __init__(self, top: Path, ignores: Which = lambda path: False, fails: Which = lambda path: False) -> None:
        self.log = Log()
        self._top, self._ignores, self._fails = top, ignores, fails
        self._numbers = itertools.count(_ROOT + 1)
        self._nodes: dict[int, int] = {os.stat(top).st_ino: _ROOT}
        self._entries: dict[Entry, int] = {}
        self._data: dict[int, tuple[tuple[int, int, int], bytes]] = {}
        self._lock = threading.Lock()
        self._note_changes(top)
        self.log.base = len(self.log.changes)

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if operation in _LOOKS_ONLY:
            return super().call(operation, path, act)
        with self._lock:
            if operation in _SYNCS:
                return super().call(operation, path, lambda: self._sync(path))  # type: ignore[arg-type,return-value]
            try:
                return super().call(operation, path, act)
            finally:
                self._note_changes(path)

    def _sync(self, path: Path) -> None:
        if self._fails(path):
            self.log.changes.append(SyncFailed(self._nodes[os.lstat(path).st_ino]))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not self._ignores(path):
            self.sync(path)

    def sync(self, path: Path) -> None:
        self.log.changes.append(Synced(self._nodes[os.lstat(path).st_ino]))

    def say(self, what: str) -> None:
        self.log.changes.append(Said(what))

    def _note_changes(self, touched: Path) -> None:
        entries = dict(self._walk(self._top, _ROOT, touched))
        gone = {entry: node for entry, node in self._entries.items() if entries.get(entry) != node}
        sources = {node: entry for entry, node in gone.items()}
        for entry, node in entries.items():
            if self._entries.get(entry) != node:
                self.log.changes.append(Renamed(node, sources.pop(node, None), entry))
        there = set(entries.values())
        for node, entry in sources.items():
            if entry not in entries:  # otherwise replaced, which is part of what replaced it
                self.log.changes.append(Renamed(node, entry, None))
        self._nodes = {inode: node for inode, node in self._nodes.items() if node in there or node == _ROOT}
        self._entries = entries

    def _walk(self, directory: Path, number: int, touched: Path) -> Iterator[tuple[Entry, int]]:
        for found in sorted(os.scandir(directory), key=lambda entry: entry.name):
            status = found.stat(follow_symlinks=False)
            node = self._nodes.get(status.st_ino)
            if node is None:
                node = self._nodes[status.st_ino] = next(self._numbers)
                self.log.kinds[node] = _kind(found.path, status)
            yield Entry(number, found.name), node
            path = Path(found.path)
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(path, node, touched)
            elif stat.S_ISREG(status.st_mode):
                self._note_data(path, node, status, is_touched=path == touched)

    def _note_data(self, path: Path, node: int, status: os.stat_result, is_touched: bool) -> None:
        """Times may be too coarse to tell two writes apart, so what was called for is read in any case."""
        marks = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        known = self._data.get(node)
        if known is not None and known[0] == marks and not is_touched:
            return
        data = path.read_bytes()
        if known is None or known[1] != data:
            self.log.changes.append(Wrote(node, data))
        self._data[node] = (marks, data)


def _kind(path: str, status: os.stat_result) -> Kind:
    if stat.S_ISLNK(status.st_mode):
        return f"-> {os.readlink(path)}"
    return "directory" if stat.S_ISDIR(status.st_mode) else "file"
