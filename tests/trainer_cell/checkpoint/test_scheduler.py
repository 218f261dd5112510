"""The LR scheduler and the iteration, row by row of the resume contract, on real cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.service.forgery import forge
from tests.trainer_cell import odd_base
from tests.trainer_cell.checkpoint.test_resharding import DATA, SPECS
from tests.trainer_cell.client import Client
from tests.trainer_cell.running_cell import RunningCell, running_cell
from trainer_cell.protocol.commands import LrSchedule
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, StateSaved
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import read_manifest

pytestmark = pytest.mark.cell

SPEC = SPECS["all but the output layer"]
SCHEDULE = LrSchedule(0.01, 0.001, 2, 5, "cosine", start_wd=0.0, end_wd=0.1, wd_incr_steps=5, wd_incr_style="linear")
OTHER = LrSchedule(0.02, 0.0, 0, 9, "linear")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("schedules")
    odd_base.write(directory / "base")
    return directory


@pytest.fixture(scope="module")
def cell(place: Path) -> Iterator[RunningCell]:
    with running_cell(place / "base", place / "checkpoints", "--dtype", "bf16") as running:
        yield running
        assert running.stop() == [0]


@pytest.fixture
def root(place: Path) -> Path:
    return place / "checkpoints"


def version_of(root: Path, uri: str) -> str:
    version = Vault(root).resolve(CheckpointAddress.parse(uri))
    assert version is not None
    return version


def saved(model: Client, root: Path, name: str) -> str:
    model.save(root, name)
    return version_of(root, f"tinker://{model.model_id}/weights/{name}")


def scheduled(cell: RunningCell, name: str, num_steps: int, schedule: LrSchedule | None = SCHEDULE) -> Client:
    model = Client(cell, f"{name}:train:0", SPEC)
    model.create(seed=3, lr_schedule=schedule)
    for step in range(num_steps):
        model.train_as_scheduled(DATA[step]) if schedule else model.train(DATA[step])
    return model


def test_an_interrupted_run_takes_the_steps_and_the_rates_of_one_that_never_stopped(
    cell: RunningCell, root: Path
) -> None:
    undisturbed = scheduled(cell, "undisturbed", 2)
    version = saved(undisturbed, root, "middle")
    expected = [undisturbed.train_as_scheduled(DATA[step]) for step in (2, 0, 1)]
    resumed = Client(cell, "resumed:train:0", SPEC)
    assert resumed.load(version).scheduler_restored
    assert [resumed.train_as_scheduled(DATA[step]) for step in (2, 0, 1)] == expected
    end, same = undisturbed.save(root, "end"), resumed.save(root, "end")
    assert same.same_as(end)
    assert same.manifest.scheduler == end.manifest.scheduler
    assert len(set(expected)) == 3


def test_a_run_whose_scheduler_was_dropped_or_rewound_diverges(cell: RunningCell, root: Path) -> None:
    """The control of the test above: it would see a scheduler that is not restored."""
    undisturbed = scheduled(cell, "seen", 2)
    version = saved(undisturbed, root, "middle")
    uri = f"tinker://{undisturbed.model_id}/weights/middle"
    undisturbed.train_as_scheduled(DATA[2])
    end = undisturbed.save(root, "end")
    dropped = version_of(root, forge(root, uri, "dropped", has_scheduler=False, scheduler=None))
    for name, source, schedule in (("dropped", dropped, SCHEDULE), ("control", version, OTHER)):
        model = Client(cell, f"{name}:train:0", SPEC)
        model.create(seed=1, lr_schedule=schedule)
        model.load(source)
        model.train_as_scheduled(DATA[2])
        assert model.save(root, "end").same_as(end) is (name == "control")


def test_a_weights_only_load_restores_iteration_and_scheduler(cell: RunningCell, root: Path) -> None:
    model = scheduled(cell, "weights-only", 2)
    version = saved(model, root, "middle")
    loaded = Client(cell, "weights-only-loaded:train:0", SPEC).load(version, load_optimizer=False)
    assert (loaded.step, loaded.iteration) == (0, 2)
    assert (loaded.optimizer_restored, loaded.scheduler_restored) == (False, True)
    again = Client(cell, "weights-only-loaded:train:0", SPEC)
    assert again.train_as_scheduled(DATA[2]) == model.train_as_scheduled(DATA[2])
    state = again.save(root, "after")
    assert (state.step, state.manifest.iteration) == (1, 3)


def test_a_checkpoint_without_a_scheduler_leaves_the_models_own_where_it_is(cell: RunningCell, root: Path) -> None:
    source = saved(scheduled(cell, "plain", 2, schedule=None), root, "plain")
    model, untouched = scheduled(cell, "keeps", 1), scheduled(cell, "untouched", 1)
    for load_optimizer in (True, False):
        loaded = model.load(source, load_optimizer)
        assert (loaded.iteration, loaded.scheduler_restored) == (2, False)
    assert model.train_as_scheduled(DATA[2]) == untouched.train_as_scheduled(DATA[2])
    bare = Client(cell, "bare:train:0", SPEC)
    assert not bare.load(source).scheduler_restored
    cell.execute(bare.forward_backward(DATA[2]))
    with pytest.raises(AssertionError, match="learning_rate is missing"):
        bare.train_as_scheduled(DATA[2])


def test_a_scheduler_is_stored_without_the_optimizer_and_in_every_kind(cell: RunningCell, root: Path) -> None:
    model = scheduled(cell, "kinds", 2)
    command = msgspec.structs.replace(model.save_command("bare"), include_optimizer=False, kind="sampler_weights")
    manifest = read_manifest(root / cell.do(command, StateSaved).version)
    assert (manifest.has_optimizer, manifest.has_scheduler, manifest.iteration) == (False, True, 2)
    assert manifest.scheduler is not None
    assert manifest.scheduler["num_steps"] == 2


@pytest.mark.parametrize("change", [{"lr_decay_style": "square"}, {"num_steps": -1}, {"max_lr": 0.0}])
def test_a_scheduler_that_is_none_is_refused_by_field_and_changes_nothing(
    cell: RunningCell, root: Path, change: dict[str, Any]
) -> None:
    [field] = change
    model = scheduled(cell, f"bad-{field}".replace("_", "-"), 2)
    before = model.save(root, "before")
    state = {**(before.manifest.scheduler or {}), **change}
    forged = forge(root, f"tinker://{model.model_id}/weights/before", "forged", scheduler=state)
    failed = cell.execute(model.load_command(version_of(root, forged)))
    assert isinstance(failed, Failed)
    assert failed.kind is ErrorKind.CHECKPOINT_CORRUPT
    assert field in failed.message
    after = model.save(root, "after")
    assert after.same_as(before)
    assert after.manifest.scheduler == before.manifest.scheduler


def test_progress_is_counted_once_over_many_saves_and_loads(cell: RunningCell, root: Path) -> None:
    model = scheduled(cell, "generations", 2)
    counts = []
    for generation in range(3):
        version = saved(model, root, f"generation{generation}")
        model = Client(cell, f"generation{generation}:train:0", SPEC)
        loaded = model.load(version)
        counts.append((loaded.step, loaded.iteration, model.save(root, "at-once").manifest.scheduler))
    assert [count[:2] for count in counts] == [(2, 2)] * 3
    assert counts[0] == counts[1] == counts[2]
    model.train_as_scheduled(DATA[2])
    state = model.save(root, "one-more")
    assert (state.step, state.manifest.iteration) == (3, 3)


def test_under_no_load_optim_iteration_and_scheduler_are_restored(place: Path, root: Path, cell: RunningCell) -> None:
    model = scheduled(cell, "full", 2)
    version = saved(model, root, "full")
    rate = model.train_as_scheduled(DATA[2])
    with running_cell(place / "base", root, "--no-load-optim", "--dtype", "bf16") as other:
        resumed = Client(other, "resumed-without:train:0", SPEC)
        loaded = resumed.load(version, load_optimizer=True)
        assert (loaded.step, loaded.iteration, loaded.scheduler_restored) == (0, 2, True)
        assert (loaded.optimizer_restored, loaded.reason) == (False, "no_load_optim")
        assert resumed.train_as_scheduled(DATA[2]) == rate
        assert other.stop() == [0]


@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 1, 2)], ids=["tp2", "pp2"])
def test_a_scheduler_goes_on_under_another_layout(
    place: Path, root: Path, cell: RunningCell, layout: tuple[int, int, int]
) -> None:
    ranks, tp, pp = layout
    model = scheduled(cell, f"from-one-to-{tp}-{pp}", 2)
    version = saved(model, root, "middle")
    rates = [model.train_as_scheduled(DATA[step]) for step in (2, 0)]
    with running_cell(place / "base", root, "--dtype", "bf16", ranks=ranks, tp=tp, pp=pp) as other:
        resumed = Client(other, f"under-{tp}-{pp}:train:0", SPEC)
        assert resumed.load(version).scheduler_restored
        assert [resumed.train_as_scheduled(DATA[step]) for step in (2, 0)] == rates
        assert resumed.save(root, "after").manifest.scheduler == model.save(root, "after").manifest.scheduler
        assert other.stop() == [0] * ranks
