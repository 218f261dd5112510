"""`python -m bench.recovery`: from a kill to the next answered command.

In each round one client trains so many commands past a state that is on disk, a part of the service is killed, and the
client's next command is sent at once. A cell that was killed starts again, loads that state and runs those commands
again first. The two baselines are measured in the same round: the same command undisturbed, and the bare start of a
cell, which no recovery of one can undercut.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import tinker

from bench.ratios import Pairs, Row, table, timed
from bench.served import KEY, BareCell, Served, served

_PATIENCE_S = 300.0
_TOKENS, _SEQUENCES = 32, 4
_ADAM = tinker.AdamParams(learning_rate=1e-3)


def _kill_gateway(service: Served) -> list[psutil.Process]:
    return [service.gateway()]


def _kill_rank(service: Served) -> list[psutil.Process]:
    return [service.rank_0()]


def _kill_both(service: Served) -> list[psutil.Process]:
    return [service.gateway(), service.rank_0()]


_KILLS: dict[str, Callable[[Served], list[psutil.Process]]] = {
    "gateway": _kill_gateway,
    "rank 0": _kill_rank,
    "both": _kill_both,
}


@dataclass
class Measured:
    """Seconds, round by round."""

    answer: list[float] = field(default_factory=list)
    command: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)


def main() -> None:
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service ends, too
    # The SDK has something to say of every load in place, and of every connection that it loses.
    warnings.simplefilter("ignore")
    logging.getLogger("tinker").setLevel(logging.CRITICAL)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=asked.directory) as name:
        directory = Path(name)
        options = ("--base-model", asked.base_model, "--ranks", str(asked.ranks))
        cell = BareCell(directory, asked.base_model, asked.ranks)
        with served(directory, *options) as service:
            print(_machine(asked), flush=True)
            print(table("From a kill to the next answered command", _rows(service, cell, asked)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="of measurements; one round more is not counted")
    parser.add_argument("--replays", type=_numbers, default=[0, 5, 20], help="commands past the state, by commas")
    parser.add_argument("--ranks", type=int, default=1, help="of the cell")
    parser.add_argument("--base-model", default="tiny", help="of the cell")
    parser.add_argument("--directory", type=Path, help="where the state lies")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _machine(asked: argparse.Namespace) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("cellgate", "torch", "tinker"))
    return (
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {libraries}\n"
        f"{asked.base_model}, ranks: {asked.ranks}; the state on disk is a checkpoint that was loaded in place; "
        "the command: forward\n"
        "times: least / median of the rounds; ratio: of the least ones, (median): of the rounds' ratios\n"
    )


def _rows(service: Served, cell: BareCell, asked: argparse.Namespace) -> Iterator[Row]:
    client = tinker.ServiceClient(base_url=service.url, api_key=KEY)
    model = client.create_lora_training_client(f"cellgate/{asked.base_model}", rank=8, seed=0).result(_PATIENCE_S)
    saved = model.save_state("bench").result(_PATIENCE_S).path
    measured = {(what, replay): Measured() for what in _KILLS for replay in asked.replays}
    for _ in range(asked.pairs + 1):
        start_s = cell.start()
        for (what, replay), times in measured.items():
            _measure(service, model, saved, what, replay, times)
            times.start.append(start_s)
    for baseline in ("one undisturbed command", "a bare start of the cell"):
        for (what, replay), times in measured.items():
            base = times.command if baseline == "one undisturbed command" else times.start
            # The first round is not counted.
            pairs = Pairs(tuple(times.answer[1:]), tuple(base[1:]))
            yield Row(f"{what} killed / {baseline}", f"{replay} replayed", pairs)
    client.close("success").result(_PATIENCE_S)


def _measure(
    service: Served, model: tinker.TrainingClient, saved: str, what: str, replay: int, times: Measured
) -> None:
    model.load_state_with_optimizer(saved).result(_PATIENCE_S)
    _train(model, replay)
    times.command.append(timed(lambda: _command(model)))
    victims = _KILLS[what](service)
    times.answer.append(timed(lambda: _kill_and_go_on(victims, model)))
    service.wait_replaced(*victims)


def _train(model: tinker.TrainingClient, num_commands: int) -> None:
    """forward_backward and optim_step by turns."""
    sent: Sequence[tinker.APIFuture[Any]] = [
        model.optim_step(_ADAM) if number % 2 else model.forward_backward(_batch(), "cross_entropy")
        for number in range(num_commands)
    ]
    for one in sent:
        one.result(_PATIENCE_S)


def _kill_and_go_on(victims: list[psutil.Process], model: tinker.TrainingClient) -> None:
    for victim in victims:
        victim.kill()
    _command(model)


def _command(model: tinker.TrainingClient) -> None:
    model.forward(_batch(), "cross_entropy").result(_PATIENCE_S)


def _batch() -> list[tinker.Datum]:
    tokens = list(range(_TOKENS))
    weights = [1.0] * (_TOKENS - 1)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},  # type: ignore[dict-item]  # lists become one
    )
    return [datum] * _SEQUENCES


if __name__ == "__main__":
    main()
