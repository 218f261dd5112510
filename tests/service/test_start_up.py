"""A service that starts with a model: `cellgate serve --lora-adapter-path`, on real ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.service.conftest import Serve
from tests.service.forgery import forge
from tests.service.rest import Rest
from tests.service.running import API_KEY, OTHER_KEY, RunningService
from tests.service.state import read_state
from tests.service.test_resume import new_model, save
from tests.service.test_schedules import NEW, SCHEDULE, Training
from tests.service.training import train
from tests.trainer_cell.training.arithmetic import run_program
from trainer_cell.training.base_models import prepare
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = pytest.mark.cell

MODEL, SECOND = "startup:train:0", "startup:train:1"


def directory_of(service: RunningService, uri: str) -> Path:
    version = Vault(service.checkpoints).resolve(CheckpointAddress.parse(uri))
    assert version is not None
    return service.checkpoints / version


def scheduled_checkpoint(service: RunningService, name: str) -> tuple[str, Training]:
    """Of a model with a learning-rate schedule, after two steps; and the model."""
    made = Rest(service).run("POST", "/v1/models", {**NEW, "lr_scheduler": SCHEDULE})
    model = Training(service, made["result"]["model_id"])
    model.step(), model.step()
    written = model.rest.run("POST", f"/v1/models/{model.model_id}/checkpoints", {"name": name})
    return written["result"]["path"], model


def test_a_copied_checkpoint_goes_on_as_the_first_tenants_model(
    one_rank: RunningService, serve: Serve, tmp_path: Path
) -> None:
    saved, undisturbed = scheduled_checkpoint(one_rank, "copied")
    copy = shutil.copytree(directory_of(one_rank, saved), tmp_path / "copy")
    rate = undisturbed.rate()
    path = f"/v1/models/{undisturbed.model_id}/checkpoints"
    after = read_state(one_rank.checkpoints, undisturbed.rest.run("POST", path, {"name": "after"})["result"]["path"])

    service = serve("--lora-adapter-path", str(copy))
    rest = Rest(service)
    model = rest.get(f"/v1/models/{MODEL}")
    assert (model["state"], model["step"], model["iteration"]) == ("ready", 2, 2)
    assert Rest(service, OTHER_KEY).http.get(f"/v1/models/{MODEL}").status_code == 404
    started = Training(service, MODEL)
    assert started.rate() == rate
    written = rest.run("POST", f"/v1/models/{MODEL}/checkpoints", {"name": "after"})["result"]["path"]
    state = read_state(service.checkpoints, written)
    assert state.same_as(after)
    assert state.manifest.scheduler == after.manifest.scheduler
    assert rest.http.post("/api/v1/create_session", json={"tags": []}).json()["warning_message"] is None
    resumed = service.client().create_training_client_from_state_with_optimizer(written).result()
    assert save(service, resumed, "by-the-sdk").same_as(state)
    assert service.stop() == 0
    # It stays, as far as it has come; another start with the option makes another model.
    service.start()
    models = Rest(service).get("/v1/models")["models"]
    found = [(one["id"], one["iteration"]) for one in models if one["id"].startswith("startup:")]
    assert found == [(SECOND, 2), (MODEL, 3)]
    assert Training(service, SECOND).rate() == rate
    assert started.rate() == undisturbed.rate()
    assert service.stop() == 0


@pytest.mark.full
def test_without_an_optimizer_in_it_everything_else_is_restored_and_the_owner_is_warned(
    one_rank: RunningService, serve: Serve, tmp_path: Path
) -> None:
    trained = new_model(one_rank)
    train(trained, range(2))
    bare = forge(
        one_rank.checkpoints,
        trained.save_state("full").result().path,
        "bare",
        lambda key, tensor: tensor if key.endswith("/weight") else None,
        has_optimizer=False,
    )
    copy = shutil.copytree(directory_of(one_rank, bare), tmp_path / "copy")
    service = serve("--lora-adapter-path", str(copy))
    rest = Rest(service)
    model = rest.get(f"/v1/models/{MODEL}")
    assert (model["step"], model["iteration"]) == (0, 2)
    written = rest.run("POST", f"/v1/models/{MODEL}/checkpoints", {"name": "start"})["result"]["path"]
    state, expected = read_state(service.checkpoints, written), read_state(one_rank.checkpoints, bare)
    assert state.part("weight") == expected.part("weight")
    assert all(not any(moment) for part in ("exp_avg", "exp_avg_sq") for moment in state.part(part).values())
    warnings = [
        Rest(service, key).http.post("/api/v1/create_session", json={"tags": []}).json()["warning_message"]
        for key in (API_KEY, OTHER_KEY)
    ]
    assert "fresh optimizer" in warnings[0]
    assert warnings[1] is None
    assert any("WARNING" in line and "fresh optimizer" in line for line in service.log)
    assert service.stop() == 0


@pytest.mark.full
def test_under_no_load_optim_the_optimizer_is_fresh_and_said_to_be(
    one_rank: RunningService, serve: Serve, tmp_path: Path
) -> None:
    saved, undisturbed = scheduled_checkpoint(one_rank, "without")
    copy = shutil.copytree(directory_of(one_rank, saved), tmp_path / "copy")
    service = serve("--lora-adapter-path", str(copy), "--load", str(tmp_path))  # a directory without a tracker
    model = Rest(service).get(f"/v1/models/{MODEL}")
    assert (model["step"], model["iteration"]) == (0, 2)
    assert Training(service, MODEL).rate() == undisturbed.rate()
    told = Rest(service).http.post("/api/v1/create_session", json={"tags": []}).json()["warning_message"]
    assert "--no-load-optim" in told
    assert "fresh optimizer" in told
    assert any("has no latest_checkpointed_iteration.txt: --no-load-optim is on" in line for line in service.log)
    assert service.stop() == 0


def serve_in_vain(state: Path, *options: str) -> tuple[int, str, list[str]]:
    """Exit status, stdout and the lines of stderr of a service that does not come up."""
    command = [sys.executable, "-m", "gateway.cli", "serve", "--base-model", "tiny", "--state", str(state)]
    ended = subprocess.run(
        [*command, "--port", "0", "--api-key", f"{API_KEY}=alice", *options],
        capture_output=True,
        text=True,
        timeout=400,
    )
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


@pytest.mark.full
def test_an_adapter_too_large_for_the_service_ends_it_with_the_reason_and_makes_no_fresh_one(
    one_rank: RunningService, tmp_path: Path
) -> None:
    saved, _ = scheduled_checkpoint(one_rank, "large")
    status, out, err = serve_in_vain(
        tmp_path, "--lora-adapter-path", str(directory_of(one_rank, saved)), "--max-lora-rank", "4"
    )
    assert (status, "ready" in out) == (1, False)
    assert err[-1].startswith("cellgate: tinker://startup:train:0/weights/adopted-")
    assert err[-1].endswith("rank must be between 1 and 4, not 8")
    assert not any("starting it again" in line for line in err)


def load_directory(base: Path, directory: Path, iteration: int) -> str:
    """What Megatron leaves of a training of `base`, newest at `iteration`."""
    run_program("megatron_checkpoint", base, directory / f"iter_{iteration:07d}", 1, 1, 16)
    (directory / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return str(directory)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_base_weights_saved_by_megatron_are_served_and_carry_the_same_checkpoints(
    one_rank: RunningService, serve: Serve, tmp_path: Path
) -> None:
    load = load_directory(prepare("tiny", tmp_path / "cache"), tmp_path / "load", 7)
    saved, undisturbed = scheduled_checkpoint(one_rank, "over-megatrons")
    rate, copy = undisturbed.rate(), shutil.copytree(directory_of(one_rank, saved), tmp_path / "copy")
    service = serve("--cache", str(tmp_path / "cache"), "--load", load, "--lora-adapter-path", str(copy))
    model = Rest(service).get(f"/v1/models/{MODEL}")
    # The adapter's own iteration, not the 7 of the tracker.
    assert (model["base_model"], model["step"], model["iteration"]) == ("cellgate/tiny", 2, 2)
    assert Training(service, MODEL).rate() == rate
    assert service.stop() == 0


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_an_adapter_over_other_weights_than_those_loaded_starts_nothing(
    one_rank: RunningService, tmp_path: Path
) -> None:
    other = shutil.copytree(prepare("tiny", tmp_path / "cache"), tmp_path / "other")
    changed = load_file(other / "model.safetensors")
    changed["model.norm.weight"] += 1.0
    save_file(changed, other / "model.safetensors")
    (other / "cellgate_base.json").unlink()
    load = load_directory(other, tmp_path / "load", 8)
    saved, _ = scheduled_checkpoint(one_rank, "over-tiny")
    copy = shutil.copytree(directory_of(one_rank, saved), tmp_path / "copy")
    status, out, err = serve_in_vain(tmp_path / "state", "--load", load, "--lora-adapter-path", str(copy))
    assert (status, "ready" in out) == (1, False)
    assert "over other base weights" in err[-1]
