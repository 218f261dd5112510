"""The plain REST face, as somebody with curl would use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.http.running import Client, RunningGateway, forward_backward, running_gateway
from trainer_cell.protocol.commands import OptimStep, SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind


def write(client: Client, method: str, path: str, body: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
    """A write and its operation, waited for."""
    answer = client.http.request(method, path, json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return wait(client, answer.headers["location"])


def wait(client: Client, location: str) -> dict[str, Any]:
    while (operation := client.get(location, wait=5))["state"] not in ("succeeded", "failed"):
        pass
    return dict(operation)


def new_model(client: Client, **headers: str) -> str:
    body = {"base_model": "tiny", "rank": 8, "seed": 7}
    return str(write(client, "POST", "/v1/models", body, **headers)["result"]["model_id"])


def train(client: Client, model_id: str, first_seq_id: int = 1) -> None:
    client.result(client.send_forward_backward(forward_backward(model_id, first_seq_id)))
    assert client.run("optim_step", model_id=model_id, seq_id=first_seq_id + 1, adam_params={})["step"]


def test_a_model_is_made_saved_loaded_and_unloaded(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = new_model(alice)
    train(alice, model_id)
    saved = write(alice, "POST", f"/v1/models/{model_id}/checkpoints", {"name": "one"})
    path = f"tinker://{model_id}/weights/one"
    assert saved["error"] is None
    assert saved["result"] == {
        "model_id": model_id,
        "path": path,
        "size_bytes": saved["result"]["size_bytes"],
        "step": 1,
        "iteration": 1,
        "has_optimizer": True,
    }
    assert saved["progress"]["bytes_done"] == saved["progress"]["bytes_total"] > 0
    train(alice, model_id, first_seq_id=3)
    loaded = write(alice, "POST", f"/v1/models/{model_id}/load", {"path": path, "load_optimizer": True})
    assert loaded["result"] == {
        "model_id": model_id,
        "path": path,
        "step": 1,
        "iteration": 1,
        "weights_restored": True,
        "optimizer_restored": True,
        "scheduler_restored": False,
        "reason": None,
    }
    assert alice.get(f"/v1/models/{model_id}")["step"] == 1
    fresh = write(alice, "POST", f"/v1/models/{model_id}/load", {"path": path, "load_optimizer": False})
    assert (fresh["result"]["optimizer_restored"], fresh["result"]["reason"]) == (False, "not_requested")
    unloaded = write(alice, "DELETE", f"/v1/models/{model_id}")
    assert unloaded["state"] == "succeeded"
    assert alice.get(f"/v1/models/{model_id}")["state"] == "unloaded"
    checkpoints = alice.get("/v1/checkpoints")
    assert [(entry["path"], entry["step"], entry["rank"]) for entry in checkpoints["checkpoints"]] == [(path, 1, 8)]
    assert alice.get("/v1/checkpoints", model_id=model_id) == checkpoints


def test_a_save_shows_where_it_is(gateway: RunningGateway) -> None:
    assert gateway.cell is not None
    alice = gateway.alice
    model_id = new_model(alice)
    hold = gateway.cell.hold_next(SaveState)
    answer = alice.http.post(f"/v1/models/{model_id}/checkpoints", json={"name": "one"})
    assert (answer.status_code, answer.json()["operation"]) == (202, "save")
    hold.wait_reached()
    location = answer.headers["location"]
    assert location == f"/v1/operations/{answer.json()['id']}"
    assert alice.get(location)["state"] == "running"
    hold.release()
    assert wait(alice, location)["state"] == "succeeded"
    assert wait(alice, location) == wait(alice, location)


def test_a_failure_is_typed_and_the_model_goes_on(gateway: RunningGateway) -> None:
    assert gateway.cell is not None
    alice = gateway.alice
    model_id = new_model(alice)
    gateway.cell.fail_next(SaveState, CommandFailed(ErrorKind.STORAGE_FAILED, "rank 0: write: ENOSPC"))
    failed = write(alice, "POST", f"/v1/models/{model_id}/checkpoints", {"name": "one"})
    assert failed["state"] == "failed"
    assert failed["result"] is None
    assert failed["error"] == {"kind": "storage_failed", "category": "server", "message": "rank 0: write: ENOSPC"}
    assert write(alice, "POST", f"/v1/models/{model_id}/checkpoints", {"name": "one"})["state"] == "succeeded"
    taken = write(alice, "POST", f"/v1/models/{model_id}/checkpoints", {"name": "one"})
    assert taken["error"]["kind"] == "checkpoint_exists"
    again = write(alice, "POST", f"/v1/models/{model_id}/checkpoints", {"name": "one", "overwrite": True})
    assert again["state"] == "succeeded"


def test_a_write_that_is_sent_again_is_run_once(gateway: RunningGateway) -> None:
    assert gateway.cell is not None
    alice = gateway.alice

    def send(method: str, path: str, body: dict[str, Any] | None, key: str) -> httpx.Response:
        return alice.http.request(method, path, json=body, headers={"Idempotency-Key": key})

    made = [send("POST", "/v1/models", {"base_model": "tiny", "rank": 8}, "k1") for _ in range(3)]
    assert len({answer.json()["id"] for answer in made}) == 1
    model_id = made[0].json()["model_id"]
    saves = [send("POST", f"/v1/models/{model_id}/checkpoints", {"name": "a"}, "k2") for _ in range(3)]
    assert len({answer.headers["location"] for answer in saves}) == 1
    assert wait(alice, saves[0].headers["location"])["state"] == "succeeded"
    late = send("POST", f"/v1/models/{model_id}/checkpoints", {"name": "a"}, "k2")
    assert (late.json()["id"], late.json()["state"]) == (saves[0].json()["id"], "succeeded")
    assert gateway.cell.count(SaveState) == 1
    other = send("POST", f"/v1/models/{model_id}/checkpoints", {"name": "b"}, "k2")
    assert (other.status_code, other.json()["type"]) == (422, "sequence_conflict")
    other = send("POST", "/v1/models", {"base_model": "tiny", "rank": 4}, "k1")
    assert (other.status_code, other.json()["type"]) == (422, "sequence_conflict")
    # Another tenant's keys are their own.
    theirs = gateway.bob.http.post(
        "/v1/models", json={"base_model": "tiny", "rank": 4}, headers={"Idempotency-Key": "k1"}
    )
    assert theirs.status_code == 202


def test_a_write_takes_no_number_and_comes_after_what_was_there(gateway: RunningGateway) -> None:
    assert gateway.cell is not None
    alice = gateway.alice
    model_id = new_model(alice)
    hold = gateway.cell.hold_next(OptimStep)
    alice.send_forward_backward(forward_backward(model_id, 1)).raise_for_status()
    alice.post("optim_step", model_id=model_id, seq_id=2, adam_params={}).raise_for_status()
    alice.send_forward_backward(forward_backward(model_id, 4)).raise_for_status()
    answer = alice.http.post(f"/v1/models/{model_id}/checkpoints", json={"name": "one"})
    hold.release()
    assert wait(alice, answer.headers["location"])["result"]["step"] == 1
    stepped = alice.post("optim_step", model_id=model_id, seq_id=3, adam_params={})
    assert alice.result(stepped).json()["kind"] == "no_gradients"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/models", {"base_model": "tiny"}),
        ("POST", "/v1/models", {"base_model": "tiny", "rank": 0}),
        ("POST", "/v1/models", {"base_model": "tiny", "rank": "8"}),
        ("POST", "/v1/models", {"rank": 8}),
        ("POST", "/v1/models", {"base_model": "tiny", "rank": 8, "seed": -1}),
        (
            "POST",
            "/v1/models",
            {"base_model": "tiny", "rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False},
        ),
        ("POST", "/v1/models/{model}/checkpoints", {}),
        ("POST", "/v1/models/{model}/checkpoints", {"name": "x", "overwrite": 1}),
        ("POST", "/v1/models/{model}/checkpoints", {"name": "x", "ttl_seconds": 10}),
        ("POST", "/v1/models/{model}/checkpoints", {"name": "x", "user_metadata": {"a": 1}}),
        ("POST", "/v1/models/{model}/load", {"path": "tinker://{model}/weights/x"}),
        ("POST", "/v1/models/{model}/load", {"path": "tinker://{model}/weights/x", "load_optimizer": None}),
        ("POST", "/v1/models/{model}/load", {"path": "tinker://{model}/weights/x", "load_optimizer": "yes"}),
        ("POST", "/v1/models/{model}/load", {"load_optimizer": True}),
    ],
)
def test_what_is_wrong_is_refused_at_the_door(
    shared_gateway: RunningGateway, method: str, path: str, body: dict[str, Any]
) -> None:
    client = shared_gateway.alice
    model_id = next((model["id"] for model in client.get("/v1/models")["models"]), None) or new_model(client)
    body = {
        name: value.replace("{model}", model_id) if isinstance(value, str) else value for name, value in body.items()
    }
    answer = client.http.request(method, path.replace("{model}", model_id), json=body)
    assert (answer.status_code, answer.json()["type"]) == (422, "invalid_request")


def test_what_cannot_be_done_fails_as_the_users_fault(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = new_model(alice)
    load = {"path": f"tinker://{model_id}/weights/none", "load_optimizer": True}
    assert write(alice, "POST", f"/v1/models/{model_id}/load", load)["error"]["kind"] == "checkpoint_not_found"
    unknown = write(alice, "POST", "/v1/models", {"base_model": "meta/none", "rank": 8})
    assert (unknown["error"]["kind"], unknown["error"]["category"]) == ("bad_command", "user")
    too_large = write(alice, "POST", "/v1/models", {"base_model": "tiny", "rank": 65})
    assert too_large["error"]["category"] == "user"


def test_readiness_follows_the_cell(directory: Path) -> None:
    with running_gateway(directory, cell=False) as gateway:
        ready = f"{gateway.where.url}/readyz"
        answer = httpx.get(ready)
        assert answer.status_code == 503
        assert answer.json()["is_ready"] is False
        assert "cell" in answer.json()["reason"]
        cell = gateway.attach_cell()
        assert httpx.get(ready).json() == {"is_ready": True, "reason": None}
        cell.kill()
        while httpx.get(ready).status_code == 200:
            pass
        gateway.attach_cell()
        assert httpx.get(ready).status_code == 200
        assert httpx.get(f"{gateway.where.url}/healthz").json() == {"status": "ok"}
