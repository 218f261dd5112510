"""The fake cell says what a real one says when its gateway goes and another comes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_cell import BASE, PATIENCE_S, FakeCell
from trainer_cell.protocol.commands import (
    Acknowledge,
    AdamParams,
    AdapterSpec,
    Array,
    Command,
    CreateModel,
    Datum,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveState,
    encode_command,
)
from trainer_cell.protocol.framing import receive_frame, send_frame
from trainer_cell.protocol.outcomes import (
    ForwardBackwardDone,
    Hello,
    ModelCreated,
    OptimStepDone,
    Outcome,
    Progress,
    StateLoaded,
    StateSaved,
    decode_said,
)
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.manifest import read_manifest

ADAPTER = AdapterSpec(4, 32.0, train_attn=True, train_mlp=True, train_unembed=True)
ADAM = AdamParams(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0)
DATUM = Datum(
    bytes(8), {"target_tokens": Array("int64", (2,), bytes(16)), "weights": Array("float32", (2,), b"\0\0\x80\x3f" * 2)}
)
CREATE = CreateModel("create", "m", ADAPTER, 7)
FORWARD_BACKWARD = ForwardBackward("fb", "m", (DATUM,), "cross_entropy", {}, False, turn=1)
STEP = OptimStep("step", "m", ADAM, turn=2)
SNAPSHOT = SaveState(
    "snapshot", "m", "latest", "recovery", True, True, "t", "2026-01-01T00:00:00Z", None, {"turn": "2"}, turn=3
)


class Gateway:
    """One after the other on the same path, as a test drives them."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self._connection: socket.socket | None = None

    def come_back(self) -> Hello:
        self.close()
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(PATIENCE_S)
        hello = self.hear()
        assert isinstance(hello, Hello)
        return hello

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def send(self, *commands: Command) -> None:
        assert self._connection is not None
        for command in commands:
            send_frame(self._connection, encode_command(command))

    def hear(self) -> Hello | Progress | Outcome:
        assert self._connection is not None
        return decode_said(receive_frame(self._connection) or b"")

    def execute(self, command: Command) -> Outcome:
        self.send(command)
        while isinstance(said := self.hear(), Progress):
            pass
        assert not isinstance(said, Hello)
        return said


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    listening = Gateway(tmp_path / "socket")
    yield listening
    listening.close()


def cell(tmp_path: Path, **options: bool) -> FakeCell:
    Vault(tmp_path / "root").create()
    return FakeCell(tmp_path / "socket", tmp_path / "root", base_model=BASE, **options)  # type: ignore[arg-type]


def test_a_fake_that_outlives_its_gateway_keeps_its_models_and_tells_what_came_of_everything(
    gateway: Gateway, tmp_path: Path
) -> None:
    with cell(tmp_path) as fake:
        assert gateway.come_back().models == ()
        gateway.send(CREATE, FORWARD_BACKWARD, STEP)
        hello = gateway.come_back()
        while len(hello.outcomes) < 3:  # it dialled before it had read everything
            hello = gateway.come_back()
        assert [type(outcome) for outcome in hello.outcomes] == [ModelCreated, ForwardBackwardDone, OptimStepDone]
        assert [(resident.model_id, resident.turn) for resident in hello.models] == [("m", 2)]
        weight = fake.slots.models["m"].weight
        assert gateway.execute(STEP) == hello.outcomes[2]
        assert (fake.count(OptimStep), len(fake.executed)) == (2, 3)
        assert fake.slots.models["m"].weight == weight
        gateway.send(Acknowledge(("create", "fb", "step")))
        assert gateway.execute(CREATE).command_id == "create"  # known no longer: it is run, and refused
        assert [outcome.command_id for outcome in gateway.come_back().outcomes] == ["create"]


def test_a_save_that_is_held_is_publishing_and_its_outcome_follows(gateway: Gateway, tmp_path: Path) -> None:
    with cell(tmp_path) as fake:
        gateway.come_back()
        gateway.execute(CREATE)
        hold = fake.hold_next_publish()
        gateway.send(SNAPSHOT)
        assert isinstance(gateway.hear(), Progress)
        hello = gateway.come_back()
        assert hello.publishing == ("snapshot",)
        gateway.send(SNAPSHOT)
        hold.release()
        while isinstance(said := gateway.hear(), Progress):
            pass
        assert isinstance(said, StateSaved)
        assert fake.executed.count(SNAPSHOT) == 1
        hello = gateway.come_back()
        assert (hello.publishing, hello.outcomes[-1]) == ((), said)


def test_a_snapshot_brings_everything_back_whatever_the_flags(gateway: Gateway, tmp_path: Path) -> None:
    with cell(tmp_path, no_save_optim=True, no_load_optim=True) as fake:
        gateway.come_back()
        for command in (CREATE, FORWARD_BACKWARD, STEP):
            gateway.execute(command)
        before = dict(vars(fake.slots.models["m"]))
        saved = gateway.execute(SNAPSHOT)
        assert isinstance(saved, StateSaved)
        assert read_manifest(tmp_path / "root" / saved.version).user_metadata == {"turn": "2"}
        for command_id, obeys_flags in (("obeys", True), ("does not", False)):
            del fake.slots.models["m"]
            load = LoadState(command_id, "m", saved.version, ADAPTER, True, obeys_flags, turn=2)
            loaded = gateway.execute(load)
            assert isinstance(loaded, StateLoaded)
            assert loaded.optimizer_restored is not obeys_flags
            assert (dict(vars(fake.slots.models["m"])) == before) is not obeys_flags
