"""What `cellgate serve` starts, and when it refuses to."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_settings import CliApp

from gateway.listener import open_listener, probe_url_of, url_of
from gateway.serve import plan_of, serve
from gateway.settings import GatewayProcessSettings, ServeSettings
from gateway.start_up import StartUp, read_start_up
from gateway.state_directory import StateDirectory
from gateway.supervisor import Plan
from tests.trainer_cell.vault.checkpoints import ADDRESS
from trainer_cell.settings import CellSettings
from trainer_cell.vault.retention import Rules

SECRET = "tml-very-secret"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with open_listener("127.0.0.1", 0) as opened:
        yield opened


def parsed(state: Path, *options: str) -> ServeSettings:
    return CliApp.run(ServeSettings, cli_args=["--state", str(state), *options])


def planned(settings: ServeSettings, listener: socket.socket) -> Plan:
    state = StateDirectory(settings.state)
    return plan_of(settings, state, {SECRET: "alice"}, listener, read_start_up(settings, state, {SECRET: "alice"}))


def cell_settings(plan: Plan) -> CellSettings:
    command = plan.cell("/prepared")
    module = command.index("trainer_cell")
    assert command[module - 1] == "-m"
    return CliApp.run(CellSettings, cli_args=command[module + 1 :])


def test_every_option_reaches_the_process_it_is_for(tmp_path: Path, listener: socket.socket) -> None:
    given = [
        "--ranks",
        "6",
        "--tp",
        "3",
        "--pp",
        "2",
        "--slots",
        "3",
        "--max-lora-rank",
        "16",
        "--dtype",
        "bf16",
        "--cache",
        "/cache",
    ]
    given += ["--no-load-optim", "--no-save-optim", "--deterministic", "--max-body-mb", "5", "--checkpoints", "/disk"]
    given += ["--recompute", "--keep-last", "3", "--keep-every", "100", "--replaced-grace-s", "60"]
    given += ["--sweep-interval-s", "5", "--tenant-quota-gb", "1.5"]
    plan = planned(parsed(tmp_path, *given), listener)
    cell = cell_settings(plan)
    assert (cell.base_model, cell.cache, cell.checkpoints) == ("/prepared", Path("/cache"), Path("/disk"))
    assert (cell.slots, cell.max_lora_rank, cell.dtype, cell.deterministic) == (3, 16, "bf16", True)
    assert cell.no_load_optim
    assert cell.no_save_optim
    assert cell.recompute
    assert (cell.tp, cell.pp) == (3, 2)
    assert plan.prepare[-4:] == ["--tp", "3", "--pp", "2"]
    assert ("--nproc-per-node", "6") in itertools.pairwise(plan.cell("/prepared"))
    gateway = CliApp.run(GatewayProcessSettings, cli_args=plan.gateway[3:])
    assert (gateway.state, gateway.checkpoint_root, gateway.max_body_mb) == (tmp_path, Path("/disk"), 5)
    assert gateway.gateway_socket == cell.gateway_socket == tmp_path / "run/cell.sock"
    assert gateway.listen_fd == listener.fileno()
    assert gateway.rules == Rules(replaced_grace_s=60, keep_last=3, keep_every=100)
    assert (gateway.sweep_interval_s, gateway.tenant_quota_bytes) == (5, 1_500_000_000)


def test_what_to_start_from_reaches_the_process_it_is_for(tmp_path: Path, listener: socket.socket) -> None:
    (tmp_path / "load" / "iter_0000120").mkdir(parents=True)
    (tmp_path / "load" / "latest_checkpointed_iteration.txt").write_text("120")
    settings = parsed(tmp_path, "--load", str(tmp_path / "load"))
    assert planned(settings, listener).prepare[-2:] == ["--weights", str(tmp_path / "load" / "iter_0000120")]
    assert not cell_settings(planned(settings, listener)).no_load_optim
    (tmp_path / "load" / "latest_checkpointed_iteration.txt").unlink()
    assert "--weights" not in planned(settings, listener).prepare
    assert cell_settings(planned(settings, listener)).no_load_optim
    state = StateDirectory(tmp_path)
    state.create()
    plan = plan_of(settings, state, {SECRET: "alice"}, listener, StartUp(checkpoint=ADDRESS))
    gateway = CliApp.run(GatewayProcessSettings, cli_args=[*plan.gateway[3:], *plan.start_up])
    assert gateway.start_up == ADDRESS.uri
    assert planned(settings, listener).start_up == ()


def test_what_was_not_given_is_the_cells_to_decide(tmp_path: Path, listener: socket.socket) -> None:
    cell = cell_settings(planned(parsed(tmp_path), listener))
    assert (cell.dtype, cell.deterministic) == (None, None)
    assert (cell.no_load_optim, cell.no_save_optim, cell.recompute) == (False, False, False)
    gateway = CliApp.run(GatewayProcessSettings, cli_args=planned(parsed(tmp_path), listener).gateway[3:])
    assert (gateway.rules, gateway.tenant_quota_bytes) == (Rules(), None)


def test_keys_are_on_no_command_line_and_not_in_the_cell(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELLGATE_API_KEY", f"{SECRET}=alice")
    monkeypatch.setenv("CELLGATE_CELL_THREADS", "1")
    plan = planned(parsed(tmp_path), listener)
    assert SECRET not in str([plan.gateway, plan.prepare, plan.cell("/prepared")])
    assert SECRET not in str(plan.cell_environment)
    assert plan.gateway_environment["CELLGATE_API_KEY"] == f"{SECRET}=alice"
    assert plan.cell_environment["CELLGATE_CELL_THREADS"] == "1"


def test_a_second_service_on_one_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = StateDirectory(tmp_path)
    held.create()
    held.lock()
    assert serve(parsed(tmp_path, "--port", "0")) == 1
    assert f"another cellgate serves from {tmp_path}" in capsys.readouterr().err


def test_a_port_in_use_is_told_by_its_address(
    tmp_path: Path, listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(listener.getsockname()[1])
    assert serve(parsed(tmp_path, "--port", port)) == 1
    told = capsys.readouterr()
    assert f"cannot listen on 127.0.0.1:{port}" in told.err
    assert told.out.startswith("cellgate api key tml-")


def test_a_service_on_every_address_is_probed_on_the_loopback_one() -> None:
    with open_listener("0.0.0.0", 0) as everywhere:
        port = everywhere.getsockname()[1]
        assert url_of("0.0.0.0", everywhere) == f"http://0.0.0.0:{port}"
        assert probe_url_of("0.0.0.0", everywhere) == f"http://127.0.0.1:{port}"
        assert url_of("::1", everywhere) == f"http://[::1]:{port}"
