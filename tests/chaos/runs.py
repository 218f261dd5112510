"""Whole runs of several clients, quiet or under fire, and what they leave: in the clients' hands and on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.clients import Record, carry_out, first_difference
from tests.chaos.gremlin import Gremlin, Kill
from tests.chaos.programme import FINAL, Operation, versions_of
from tests.chaos.progress import Progress
from tests.chaos.proxy import Fault, FaultPlan, Proxy
from tests.service.running import RunningService
from tests.service.state import State, read_state
from trainer_cell.vault.layout import VERSIONS, Vault, directory_name

# By the number of the client.
Programmes = Mapping[int, Sequence[Operation]]


@dataclass(frozen=True)
class Left:
    """Of each client. states: the final checkpoint's; versions: how often each name was published, for each of its
    models; snapshots: what the service wrote down for itself at the client's goodbye, filled in once it has stopped.
    """

    records: list[Record]
    states: list[State]
    versions: list[list[Counter[str]]]
    snapshots: list[State] = field(default_factory=list)


def quiet_run(service: RunningService, programmes: Programmes) -> Left:
    progress = Progress(len(programmes))
    progress.quiet()
    with ThreadPoolExecutor(len(programmes)) as pool:
        clients = [
            pool.submit(carry_out, service.url, number, operations, progress)
            for number, operations in programmes.items()
        ]
        all_or_none(clients, progress)
    return what_is_left(service, [client.result() for client in clients])


def run_under_fire(service: RunningService, programmes: Programmes, kills: Sequence[Kill], ranks: int) -> Left:
    """Every client behind a proxy of its own; raises `AssertionError` when a planned kill or a kind of fault was
    missing, since the run would then show less than it says."""
    progress = Progress(len(programmes))
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(service.url, FaultPlan(number))) for number in programmes]
        gremlin = Gremlin(service, ranks, lambda url: retarget(proxies, url), len(kills))
        pool = stack.enter_context(ThreadPoolExecutor(len(programmes) + 1))
        hunt = pool.submit(gremlin.run, kills, progress)
        clients = [
            pool.submit(carry_out, proxy.url, number, operations, progress)
            for proxy, (number, operations) in zip(proxies, programmes.items(), strict=True)
        ]
        try:
            all_or_none([*clients, hunt], progress)
        except BaseException as error:
            progress.stop()
            error.add_note("killed:\n" + "\n".join(gremlin.done) + "\nlog:\n" + "".join(service.log))
            raise
    assert len(gremlin.done) == len(kills), gremlin.done
    assert {fault for proxy in proxies for fault in proxy.counts} == set(Fault)
    assert [proxy.disagreements for proxy in proxies] == [[]] * len(proxies)
    return what_is_left(service, [client.result() for client in clients])


def retarget(proxies: Sequence[Proxy], url: str) -> None:
    for proxy in proxies:
        proxy.target = url


def all_or_none(parts: Sequence[Future[Any]], progress: Progress) -> None:
    """Wait for all; when one fails the others are broken off, and it is raised."""
    done, _ = wait(parts, return_when=FIRST_EXCEPTION)
    failed = [part for part in done if part.exception() is not None]
    if failed:
        progress.stop()
        # The others only say that they were stopped.
        failed[0].result()


def what_is_left(service: RunningService, records: list[Record]) -> Left:
    finals = [f"tinker://{record.model_ids[-1]}/weights/{FINAL}" for record in records]
    return Left(
        records,
        [read_state(service.checkpoints, final) for final in finals],
        [[published(service, model_id) for model_id in record.model_ids] for record in records],
    )


def read_snapshots(root: Path, left: Left) -> None:
    """Once the service has stopped."""
    left.snapshots.extend(read_state(root, f"tinker://{one.model_ids[-1]}/recovery/latest") for one in left.records)


def published(service: RunningService, model_id: str) -> Counter[str]:
    """How many versions of each name a model has, those included that were replaced."""
    directory = Vault(service.checkpoints).root / directory_name(model_id) / VERSIONS
    names = [version.name for version in directory.glob("weights.*")] if directory.exists() else []
    return Counter(name.removeprefix("weights.").rpartition(".")[0] for name in names)


def assert_same(quiet: Left, disturbed: Left, programmes: Programmes, parts: frozenset[str]) -> None:
    """To the last bit, and nothing more often than it was asked for. parts: what a final checkpoint holds."""
    pairs = zip(quiet.records, disturbed.records, quiet.states, disturbed.states, strict=True)
    for number, (one, other, state, found) in enumerate(pairs):
        assert first_difference(one, other) is None, (number, first_difference(one, other))
        assert found.same_as(state), number
        assert found.manifest.iteration == state.manifest.iteration, number
        assert {key.rpartition("/")[2] for key in found.tensors} == parts
    for number, (snapshot, found) in enumerate(zip(quiet.snapshots, disturbed.snapshots, strict=True)):
        # Always of everything, whatever checkpoints hold.
        assert snapshot.manifest.has_optimizer, number
        assert found.same_as(snapshot), number
        assert found.manifest.iteration == snapshot.manifest.iteration, number
    expected = [versions_of(operations) for operations in programmes.values()]
    assert quiet.versions == expected
    assert disturbed.versions == expected
