"""What a client does, command by command: a function of its number alone, so that two runs can be compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FINAL = "final"

# Of a client with this number modulo their count: they differ in rank and in what is trained.
SHAPES: Sequence[dict[str, Any]] = (
    {"rank": 8},
    {"rank": 4, "train_unembed": False},
    {"rank": 3, "train_mlp": False},
    {"rank": 16, "train_attn": False},
)


@dataclass(frozen=True)
class ForwardBackward:
    """batch: its number; with the client's own it says what is in it."""

    batch: int


@dataclass(frozen=True)
class Forward:
    batch: int


@dataclass(frozen=True)
class OptimStep:
    learning_rate: float


@dataclass(frozen=True)
class Save:
    name: str
    overwrite: bool = False


@dataclass(frozen=True)
class Load:
    """In place, of the newest checkpoint this client has under `name`."""

    name: str
    optimizer: bool


@dataclass(frozen=True)
class Continue:
    """A new model from a checkpoint, with which the client goes on."""

    name: str
    optimizer: bool


Operation = ForwardBackward | Forward | OptimStep | Save | Load | Continue


class Author:
    """Writes the programme of one client."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(f"programme/{number}")
        self._num_batches = 0
        self._saved: list[str] = []
        self._taken: set[str] = set()

    def write(self, num_steps: int) -> Iterator[Operation]:
        """`num_steps` steps, a final save, and two steps more that show what the final state did not hold."""
        for step in range(num_steps):
            yield from self._gradient()
            yield from self._step()
            if self._saved and step == num_steps // 2:
                yield self._continue()
            yield from self._between()
        yield Save(FINAL)
        for _ in range(2):
            yield self._forward_backward()
            yield from self._step()
        yield Forward(0)

    def _gradient(self) -> Iterator[Operation]:
        yield self._forward_backward()
        if self._draw(0.25):
            yield self._forward_backward()
        if self._saved and self._draw(0.05):
            # Drops the gradients so far.
            yield Load(self._random.choice(self._saved), self._draw(0.5))
            yield self._forward_backward()
        if self._draw(0.08):
            yield from self._save()

    def _step(self) -> Iterator[Operation]:
        yield OptimStep(self._random.choice([1e-3, 3e-3, 1e-2]))
        if self._draw(0.05):
            # Fails: there is no gradient any more.
            yield OptimStep(1e-2)

    def _between(self) -> Iterator[Operation]:
        if self._draw(0.15):
            yield from self._save()
        if self._saved and self._draw(0.1):
            yield Load(self._random.choice(self._saved), self._draw(0.5))
        if self._draw(0.1):
            yield Forward(self._random.randrange(1000))

    def _save(self) -> Iterator[Operation]:
        name = self._random.choice(["a", "b", f"c{self._num_batches}"])
        if name in self._taken and self._draw(0.3):
            # Fails: the name is taken.
            yield Save(name)
            return
        yield Save(name, overwrite=name in self._taken)
        self._taken.add(name)
        if name not in self._saved:
            self._saved.append(name)

    def _continue(self) -> Operation:
        # The new model has no checkpoints; those of the old one stay loadable.
        self._taken.clear()
        return Continue(self._random.choice(self._saved), self._draw(0.5))

    def _forward_backward(self) -> Operation:
        self._num_batches += 1
        return ForwardBackward(self._num_batches)

    def _draw(self, probability: float) -> bool:
        return self._random.random() < probability


def programme(number: int, num_steps: int) -> list[Operation]:
    return list(Author(number).write(num_steps))


def versions_of(operations: Sequence[Operation]) -> list[Counter[str]]:
    """How often each name is published, for each model in the order they are made."""
    models: list[Counter[str]] = [Counter()]
    for operation in operations:
        match operation:
            case Continue():
                models.append(Counter())
            case Save(name, overwrite) if overwrite or not models[-1][name]:
                models[-1][name] += 1
    return models
