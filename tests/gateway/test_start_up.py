"""Which checkpoint and which weights the options of a start stand for, and what is refused before anything runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import CliApp

from gateway.scheduling.identity import tenant_digester
from gateway.serve import serve
from gateway.settings import ServeSettings
from gateway.start_up import MODEL_ID, StartUp, StartUpRefused, read_start_up, start_up_address
from gateway.state_directory import StateDirectory
from tests.service.state import read_state
from tests.trainer_cell.checkpoint.formats.peft_writer import write_peft_files
from tests.trainer_cell.checkpoint.formats.states import random_state, stored_bytes
from tests.trainer_cell.vault.checkpoints import ADDRESS, contents, load, new_vault, save, tree
from trainer_cell.training.base_models import prepare
from trainer_cell.vault.errors import VaultLocked
from trainer_cell.vault.layout import CheckpointAddress, Vault

KEYS = {"tml-first": "alice", "tml-second": "bob"}


class Start:
    def __init__(self, state: Path) -> None:
        self.state = StateDirectory(state)
        self.state.create()
        self.vault = new_vault(state / "checkpoints")
        self.digest = tenant_digester(self.state.tenant_secret())

    def read(self, *options: str) -> StartUp:
        settings = CliApp.run(ServeSettings, cli_args=["--state", str(self.state.path), *options])
        return read_start_up(settings, self.state, KEYS)

    def checkpoint(self, path: object) -> CheckpointAddress:
        found = self.read("--lora-adapter-path", str(path)).checkpoint
        assert found is not None
        return found

    def saved(self, tenant: str = "alice", **facts: Any) -> Path:
        return self.vault.version_dir(save(self.vault, tenant_digest=self.digest(tenant), **facts))


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path / "state")


def test_the_first_tenants_own_checkpoint_is_taken_where_it_is(start: Start) -> None:
    version = start.saved()
    before = tree(start.vault.root)
    for path in (version, start.vault.public_path(ADDRESS), ADDRESS.uri, os.path.relpath(version)):
        assert start.checkpoint(path) == ADDRESS
    assert tree(start.vault.root) == before


@pytest.mark.parametrize(
    "what", ["copy", "another tenant's", "expired", "replaced", "address of another tenant's", "sampler"]
)
def test_any_other_is_copied_in_for_the_first_tenant(start: Start, tmp_path: Path, what: str) -> None:
    path: object
    if what == "copy":
        path = shutil.copytree(start.saved(), tmp_path / "copy")
    elif what == "expired":
        path = start.saved(expires="2025-12-01T00:00:00Z")
    elif what == "replaced":
        path = start.saved()
        start.saved(seed=2, overwrite=True)
    elif what == "sampler":
        path = start.saved(address=CheckpointAddress("s-1:train:0", "sampler_weights", "n"))
    else:
        path = start.saved("bob")
        path = ADDRESS.uri if what.startswith("address") else path
    address = start.checkpoint(path)
    assert (address.model_id, address.kind) == (MODEL_ID, "weights")
    assert load(start.vault, address) == contents(1)
    assert start.checkpoint(path) == address


def test_without_the_options_nothing_is_touched(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.create()
    settings = CliApp.run(ServeSettings, cli_args=["--state", str(tmp_path)])
    assert read_start_up(settings, state, KEYS) == StartUp()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def damaged(start: Start, tmp_path: Path) -> Path:
    copy = shutil.copytree(start.saved(), tmp_path / "damaged")
    (copy / "rank00001.safetensors").write_bytes(b"")
    return copy


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("/nowhere", "there is no such directory"),
        ("tinker://s-1:train:0/weights/none", "there is no such checkpoint"),
        ("tinker://s-1", "a checkpoint's address is"),
        ("file", "is not a directory"),
        ("empty", "there is no checkpoint here"),
        ("damaged", r"file rank00001\.safetensors is 0 bytes"),
    ],
)
def test_what_cannot_be_started_from_ends_it_with_one_line_that_says_why(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, named: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    given = str(damaged(start, tmp_path)) if what == "damaged" else what
    given = str(tmp_path / what) if what in ("file", "empty") else given
    with pytest.raises(StartUpRefused, match=named):
        start.read("--lora-adapter-path", given)
    options = ["--state", str(start.state.path), "--port", "0", "--api-key", "tml-key=alice"]
    settings = CliApp.run(ServeSettings, cli_args=[*options, "--lora-adapter-path", given])
    capsys.readouterr()
    assert serve(settings) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("cellgate: --lora-adapter-path ")
    assert told.err.count("\n") == 1


def test_an_adapter_in_another_format_is_imported_at_the_trackers_iteration(start: Start, tmp_path: Path) -> None:
    base, adapter = prepare("tiny", tmp_path / "cache"), tmp_path / "adapter"
    state = random_state(base)
    write_peft_files(adapter, state)
    settings = CliApp.run(
        ServeSettings,
        cli_args=["--state", str(start.state.path), "--base-model", str(base), "--lora-adapter-path", str(adapter)],
    )
    for _ in range(2):
        address = start_up_address(settings, start.vault, start.digest("alice"), None, iteration=7)
        found = read_state(start.vault.root, address.uri)
        assert found.tensors == stored_bytes(state, ("weight",))
        assert (found.manifest.iteration, found.manifest.has_optimizer) == (7, False)
        assert found.manifest.tenant_digest == start.digest("alice")


def test_a_root_in_use_is_not_written_to(start: Start, tmp_path: Path) -> None:
    copy = shutil.copytree(start.saved("bob"), tmp_path / "copy")
    with Vault(start.vault.root).lock(), pytest.raises(VaultLocked):
        start.checkpoint(copy)


@pytest.mark.parametrize(("word", "files", "iteration"), [("120\n", "iter_0000120", 120), ("release", "release", 0)])
def test_the_tracker_names_the_weights(start: Start, tmp_path: Path, word: str, files: str, iteration: int) -> None:
    (tmp_path / "load" / files).mkdir(parents=True)
    (tmp_path / "load" / "latest_checkpointed_iteration.txt").write_text(word)
    found = start.read("--load", str(tmp_path / "load"))
    assert (found.weights, found.no_load_optim) == (tmp_path / "load" / files, False)


def test_a_load_directory_without_a_tracker_turns_no_load_optim_on_and_says_so(start: Start, tmp_path: Path) -> None:
    options = ["--state", str(start.state.path), "--load", str(tmp_path)]
    found = start.read(*options[2:])
    assert (found.weights, found.no_load_optim) == (None, True)
    assert "--no-load-optim is on" in found.notes[0]
    assert CliApp.run(ServeSettings, cli_args=options).shown()["no_load_optim"] is True
    assert CliApp.run(ServeSettings, cli_args=options[:2]).shown()["no_load_optim"] is False


@pytest.mark.parametrize(
    ("word", "named"), [("", "no iteration"), ("-1", "no iteration"), ("1/../2", "no iteration"), ("7", "iter_0000007")]
)
def test_a_tracker_that_names_nothing_is_refused(start: Start, tmp_path: Path, word: str, named: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    with pytest.raises(StartUpRefused, match=named):
        start.read("--load", str(tmp_path))
    with pytest.raises(StartUpRefused, match="there is no such directory"):
        start.read("--load", str(tmp_path / "nowhere"))
