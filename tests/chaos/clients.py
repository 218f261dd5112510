"""Clients of the unmodified SDK that carry out a programme and note down every answer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import tinker

from tests.chaos.programme import (
    FINAL,
    SHAPES,
    Continue,
    Forward,
    ForwardBackward,
    Load,
    Operation,
    OptimStep,
    Save,
)
from tests.chaos.progress import Progress
from tests.service.running import API_KEY
from tests.service.training import batch, logprobs_of

# Sent and not yet answered, of one client.
_PIPELINED = 6
# Longer than any recovery; a future that is not answered by then is a failure.
ANSWER_S = 300.0

Answer = tuple[object, ...]


@dataclass
class Record:
    """model_ids: in the order they were made; answers: to each operation of the programme, in its order."""

    model_ids: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


class Trainee:
    """One client's models, one after the other. `number` says what it trains; the SDK client may be shared."""

    def __init__(self, service: tinker.ServiceClient, number: int, progress: Progress) -> None:
        self.record = Record()
        self._service = service
        self._number = number
        self._progress = progress
        self._paths: dict[str, str] = {}
        self._pending: deque[Callable[[], Answer]] = deque()
        made = service.create_lora_training_client("cellgate/tiny", seed=number, **SHAPES[number % len(SHAPES)])
        self._model = self._go_on_with(made.result(ANSWER_S))

    def do(self, operations: Iterable[Operation], pipelined: int = _PIPELINED) -> None:
        """Send all, waiting for an answer only when more than `pipelined` are due."""
        for operation in operations:
            if isinstance(operation, Continue):
                self.settle()
                self._continue(operation)
                continue
            self._pending.append(self._send(operation))
            while len(self._pending) > pipelined:
                self._take_answer()

    def settle(self) -> None:
        """Wait for every answer that is due."""
        while self._pending:
            self._take_answer()

    def _take_answer(self) -> None:
        answer = self._pending.popleft()
        try:
            said = answer()
        except tinker.RequestFailedError as error:
            said = ("failed", str(error.category))
        self.record.answers.append(said)
        self._progress.note()

    def _send(self, operation: Operation) -> Callable[[], Answer]:
        model = self._model
        match operation:
            case ForwardBackward(number):
                passed = model.forward_backward(self._batch(number), "cross_entropy")
                return lambda: _passed(operation, passed.result(ANSWER_S))
            case Forward(number):
                looked = model.forward(self._batch(number), "cross_entropy")
                return lambda: _passed(operation, looked.result(ANSWER_S))
            case OptimStep(learning_rate):
                stepped = model.optim_step(_adam(learning_rate, self._number))
                return lambda: (operation, stepped.result(ANSWER_S).metrics)
            case Save(name, overwrite):
                self._paths[name] = path = f"tinker://{model.model_id}/weights/{name}"
                saved = model.save_state(name, overwrite=overwrite)
                return lambda: (operation, saved.result(ANSWER_S).path == path)
            case Load(name, optimizer):
                load = model.load_state_with_optimizer if optimizer else model.load_state
                loaded = load(self._paths[name])
                return lambda: (operation, loaded.result(ANSWER_S) is not None)
            case Continue():
                raise AssertionError("a new model is no command of the old one")

    def _continue(self, operation: Continue) -> None:
        path = self._paths[operation.name]
        if operation.optimizer:
            made = self._service.create_training_client_from_state_with_optimizer(path)
        else:
            made = self._service.create_training_client_from_state(path)
        self._model = self._go_on_with(made.result(ANSWER_S))
        self.record.answers.append((operation,))

    def _go_on_with(self, model: tinker.TrainingClient) -> tinker.TrainingClient:
        self.record.model_ids.append(model.model_id)
        self._progress.note()
        return model

    def _batch(self, number: int) -> list[tinker.Datum]:
        return batch(number, data_seed=self._number, size=2)


def _adam(learning_rate: float, number: int) -> tinker.AdamParams:
    pick = random.Random(f"adam/{number}")
    return tinker.AdamParams(
        learning_rate=learning_rate * pick.choice([0.5, 1.0, 2.0]),
        beta1=pick.choice([0.8, 0.9]),
        beta2=pick.choice([0.95, 0.999]),
        eps=1e-8,
        weight_decay=pick.choice([0.0, 0.01]),
        grad_clip_norm=pick.choice([0.0, 1.0]),
    )


def _passed(operation: Operation, output: tinker.ForwardBackwardOutput) -> Answer:
    return (operation, logprobs_of(output), output.metrics)


def carry_out(url: str, number: int, operations: Sequence[Operation], progress: Progress) -> Record:
    """A client's whole life, from the opening of its session to its goodbye.

    From the final save on it wants quiet: its model is in a slot then, and its goodbye has all of it written down.
    """
    at = operations.index(Save(FINAL))
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    try:
        trainee = Trainee(service, number, progress)
        trainee.do(operations[:at])
        trainee.settle()
        progress.wait_for_quiet()
        trainee.do(operations[at:])
        trainee.settle()
        service.close("success").result(ANSWER_S)
        return trainee.record
    finally:
        close_quietly(service)


def close_quietly(service: Any) -> None:
    """As if its program had died: no more heartbeats, and nothing said."""
    if not service._closed:
        service.holder.run_coroutine_threadsafe(service._close_holders()).result(timeout=30)


def first_difference(one: Record, other: Record) -> str | None:
    """Where two runs of one programme part, for people; None when all answers are equal to the last bit."""
    for at, (left, right) in enumerate(zip_longest(one.answers, other.answers)):
        if left != right:
            return f"answer {at}: {left!r} and {right!r}"
    return None
