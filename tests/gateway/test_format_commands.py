"""`cellgate import` and `cellgate export`, as somebody at a shell uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.scheduling.identity import tenant_digester
from gateway.state_directory import StateDirectory
from tests.gateway.test_cli import run
from tests.service.state import read_state
from tests.trainer_cell.checkpoint.formats.peft_writer import write_peft_files
from tests.trainer_cell.checkpoint.formats.states import random_state, stored_bytes
from trainer_cell.training.base_models import prepare


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny", tmp_path_factory.mktemp("cache"))


def test_an_adapter_goes_in_for_a_tenant_and_out_again(
    tmp_path: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state, place = random_state(base), ("--state", str(tmp_path / "state"))
    write_peft_files(tmp_path / "adapter", state)
    of_alice = ("import", str(tmp_path / "adapter"), "--model-id", "mine:import:0", "--base-model", str(base))
    assert run(*of_alice, "--name", "one", "--tenant", "alice", *place) == 0
    told = capfd.readouterr()
    uri = "tinker://mine:import:0/weights/one"
    assert told.out.startswith(f"{uri}\timported from peft: iteration 0, step 0, without optimizer")
    assert told.err == ""
    found = read_state(tmp_path / "state" / "checkpoints", uri)
    assert found.tensors == stored_bytes(state, ("weight",))
    assert found.manifest.base_model == "cellgate/tiny"
    secret = StateDirectory(tmp_path / "state").tenant_secret()
    assert found.manifest.tenant_digest == tenant_digester(secret)("alice")

    assert run(*of_alice, "--name", "one", "--tenant", "alice", *place) == 1
    assert "exists already" in capfd.readouterr().err
    assert run(*of_alice, "--name", "two", "--tenant", "bob", *place) == 1
    assert "another tenant's" in capfd.readouterr().err

    for number, command in enumerate((("export",), ("checkpoints", "export"))):
        target = tmp_path / f"out-{number}"
        assert run(*command, uri, "--format", "peft", "--to", str(target), *place) == 0
        assert f"{target}\texported as peft" in capfd.readouterr().out
        assert (target / "adapter_config.json").is_file()
    assert run("export", uri, "--format", "peft", "--to", str(tmp_path / "out-0"), *place) == 1
    told = capfd.readouterr()
    assert told.err == "cellgate: out-0: exists already; an export overwrites nothing\n"


@pytest.mark.full
def test_a_refusal_is_one_line_and_status_1(tmp_path: Path, base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_peft_files(tmp_path / "adapter", random_state(base), use_dora=True)
    options = ("--model-id", "m", "--name", "one", "--base-model", str(base), "--state", str(tmp_path / "state"))
    assert run("import", str(tmp_path / "adapter"), *options) == 1
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "cellgate: adapter_config.json: use_dora is set, which is not supported\n")


@pytest.mark.parametrize("arguments", [["import"], ["export"], ["import", "x", "--format", "pickle"], ["export", "x"]])
def test_options_that_cannot_be_used_end_with_status_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert capfd.readouterr().err.strip()
