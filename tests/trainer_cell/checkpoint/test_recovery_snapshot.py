"""A recovery snapshot holds everything a model is, whatever the flags of its cell say and whatever values it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.service.state import State, read_state
from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client
from tests.trainer_cell.running_cell import RunningCell
from tests.trainer_cell.training.arithmetic import batches
from trainer_cell.protocol.commands import AdapterSpec, ByteQuota, LrSchedule, SaveState
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, OptimStepDone, StateLoaded, StateSaved
from trainer_cell.vault.layout import Vault

pytestmark = pytest.mark.cell

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(odd_base.VOCAB, 4, (17, 5, 33, 2))
FLAGS = ("--no-save-optim", "--no-load-optim")
SCHEDULE = LrSchedule(1e-3, 0.0, 1, 9, "linear")
LAYOUTS = {"alone": (1, 1, 1), "dp2": (2, 1, 1), "tp2": (2, 2, 1)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_base.write(tmp_path_factory.mktemp("odd") / "base")


class Flagged:
    """A cell that saves and loads no optimizer for its clients, and a model that has taken two steps."""

    def __init__(self, base: Path, root: Path, layout: str, *options: str) -> None:
        ranks, tp, pp = LAYOUTS[layout]
        self.root = root
        self.cell = RunningCell(base, root, *FLAGS, *options, ranks=ranks, tp=tp, pp=pp)
        self.model = Client(self.cell, "session:train:0", SPEC)
        self.model.create(1, SCHEDULE)
        self.model.train_as_scheduled(DATA[0])
        self.model.train_as_scheduled(DATA[1])

    def snapshot_command(self) -> SaveState:
        command = self.model.save_command("latest")
        return msgspec.structs.replace(command, kind="recovery", user_metadata={"turn": "4"}, quota=ByteQuota(1, 1))

    def snapshot(self) -> tuple[str, State]:
        """Its version, and what is in it."""
        saved = self.cell.do(self.snapshot_command(), StateSaved)
        return saved.version, read_state(self.root, f"tinker://{self.model.model_id}/recovery/latest")

    def bring_back(self, version: str) -> StateLoaded:
        command = msgspec.structs.replace(self.model.load_command(version), obeys_flags=False)
        return self.cell.do(command, StateLoaded)


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Iterator[Callable[..., Flagged]]:
    started: list[Flagged] = []

    def start(layout: str, *options: str) -> Flagged:
        started.append(Flagged(base, tmp_path / "checkpoints", layout, *options))
        return started[-1]

    yield start
    for one in started:
        one.cell.close()


@pytest.mark.parametrize(("layout", "dtype"), [("alone", "fp32"), ("alone", "bf16"), ("dp2", "bf16"), ("tp2", "fp32")])
def test_what_a_recovery_snapshot_brings_back_goes_on_as_if_nothing_had_been(
    start: Callable[..., Flagged], layout: str, dtype: str
) -> None:
    run = start(layout, "--dtype", dtype)
    model = run.model
    version, before = run.snapshot()
    assert before.manifest.user_metadata == {"turn": "4"}
    assert before.part("exp_avg")
    rate = model.train_as_scheduled(DATA[2])
    _, after = run.snapshot()
    model.free()
    loaded = run.bring_back(version)
    assert (loaded.optimizer_restored, loaded.scheduler_restored, loaded.reason) == (True, True, None)
    assert (loaded.step, loaded.iteration) == (2, 2)
    _, again = run.snapshot()
    assert again.same_as(before)
    assert again.manifest.adam_params == before.manifest.adam_params
    assert model.train_as_scheduled(DATA[2]) == rate
    _, later = run.snapshot()
    assert later.same_as(after)
    assert not after.same_as(before)
    assert run.cell.stop() == [0] * LAYOUTS[layout][0]


def test_a_checkpoint_of_a_client_obeys_the_flags_and_so_does_a_clients_load_of_a_snapshot(
    start: Callable[..., Flagged],
) -> None:
    run = start("alone")
    model = run.model
    version, before = run.snapshot()
    saved = run.cell.do(model.save_command("n"), StateSaved)
    assert (saved.has_optimizer, before.manifest.has_optimizer) == (False, True)
    loaded = model.load(version)
    assert (loaded.optimizer_restored, loaded.reason, loaded.step) == (False, "no_load_optim", 0)
    _, without = run.snapshot()
    assert not without.same_as(before)
    refused = run.cell.execute(msgspec.structs.replace(model.load_command(saved.version), obeys_flags=False))
    assert isinstance(refused, Failed)
    assert refused.kind is ErrorKind.NO_OPTIMIZER_STATE


def test_the_quota_binds_the_checkpoints_of_clients_alone(start: Callable[..., Flagged]) -> None:
    run = start("alone")
    assert isinstance(run.cell.execute(run.snapshot_command()), StateSaved)
    refused = run.cell.execute(msgspec.structs.replace(run.model.save_command("n"), quota=ByteQuota(1, 1)))
    assert isinstance(refused, Failed)
    assert refused.kind is ErrorKind.QUOTA_EXCEEDED


@pytest.mark.parametrize("layout", ["alone", "tp2"])
def test_values_that_are_not_finite_come_back_from_a_snapshot_bit_for_bit(
    start: Callable[..., Flagged], layout: str
) -> None:
    run = start(layout)
    model = run.model
    # Weights of about ten, and then a decay by the largest factor there is.
    for rate, decay in ((10.0, 0.0), (1e37, 30.0)):
        run.cell.execute(model.forward_backward(DATA[2]))
        ruinous = msgspec.structs.replace(model.optim_step().adam, learning_rate=rate, weight_decay=decay)
        run.cell.do(msgspec.structs.replace(model.optim_step(), adam=ruinous), OptimStepDone)
    version, ruined = run.snapshot()
    assert ruined.manifest.non_finite
    # The control: what a client could not load, a client cannot save.
    refused = run.cell.execute(model.save_command("n"))
    assert isinstance(refused, Failed)
    assert refused.kind is ErrorKind.NON_FINITE_STATE
    model.free()
    run.bring_back(version)
    assert run.snapshot()[1].same_as(ruined)


def test_a_snapshot_takes_the_place_of_the_one_before_and_is_told_among_no_checkpoints(
    start: Callable[..., Flagged],
) -> None:
    run = start("alone")
    first, _ = run.snapshot()
    second, _ = run.snapshot()
    link = run.root / "session~train~0" / ".recovery" / "latest"
    assert link.is_symlink()
    assert link.resolve() == Vault(run.root).version_dir(second).resolve() != Vault(run.root).version_dir(first)
    assert not (run.root / "session~train~0" / "recovery").exists()
