"""Training runs, checkpoints and sessions as they are listed; after a restart the files alone tell of them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from tests.gateway.http.running import Client, RunningGateway, running_gateway


def save(client: Client, model_id: str, *names: str, first_seq_id: int = 1, **others: object) -> None:
    for seq_id, name in enumerate(names, start=first_seq_id):
        assert "path" in client.run("save_weights", model_id=model_id, seq_id=seq_id, path=name, **others)


def ids(client: Client, path: str, **query: object) -> list[str]:
    return [entry["checkpoint_id"] for entry in client.get(path, **query)["checkpoints"]]


def test_runs_are_listed_in_pages_the_one_used_last_first(gateway: RunningGateway) -> None:
    alice = gateway.alice
    models = [alice.new_model() for _ in range(3)]
    save(alice, models[0], "a")
    listed = alice.get("/api/v1/training_runs", limit=2)
    assert [run["training_run_id"] for run in listed["training_runs"]] == [models[0], models[2]]
    assert listed["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    rest = alice.get("/api/v1/training_runs", limit=2, offset=2, access_scope="accessible")
    assert [run["training_run_id"] for run in rest["training_runs"]] == [models[1]]
    run = alice.get(f"/api/v1/training_runs/{models[0]}")
    assert (run["base_model"], run["lora_rank"], run["is_lora"], run["model_owner"]) == (
        "cellgate/tiny",
        8,
        True,
        "alice",
    )
    assert run["last_checkpoint"]["tinker_path"] == f"tinker://{models[0]}/weights/a"
    assert datetime.fromisoformat(run["last_request_time"]).tzinfo is not None


def test_checkpoints_are_listed_newest_first_with_what_was_said_of_them(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id, other = alice.new_model(), alice.new_model()
    save(alice, model_id, "10", "9")
    save(alice, other, "8", ttl_seconds=7200, user_metadata={"batch": "8"})
    assert ids(alice, "/api/v1/checkpoints") == ["weights/8", "weights/9", "weights/10"]
    assert ids(alice, "/api/v1/checkpoints", limit=1, offset=1) == ["weights/9"]
    assert ids(alice, f"/api/v1/training_runs/{model_id}/checkpoints") == ["weights/9", "weights/10"]
    (entry,) = alice.get(f"/api/v1/training_runs/{other}/checkpoints")["checkpoints"]
    assert (entry["checkpoint_type"], entry["user_metadata"], entry["public"]) == ("training", {"batch": "8"}, False)
    made, expires = datetime.fromisoformat(entry["time"]), datetime.fromisoformat(entry["expires_at"])
    assert made.tzinfo is not None
    assert 7190 < (expires - made).total_seconds() < 7210


def test_a_model_without_checkpoints_has_an_empty_list_and_an_unknown_one_is_404(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    assert ids(alice, f"/api/v1/training_runs/{model_id}/checkpoints") == []
    for path in ("training_runs/none:train:0", "training_runs/none:train:0/checkpoints"):
        assert alice.http.get(f"/api/v1/{path}").status_code == 404


def test_where_the_journal_is_lost_the_files_alone_tell_of_runs_and_can_be_loaded_and_deleted(directory: Path) -> None:
    with running_gateway(directory) as gateway:
        model_id = gateway.alice.new_model()
        save(gateway.alice, model_id, "a", "b")
    for file in directory.glob("journal.sqlite3*"):
        file.unlink()
    with running_gateway(directory) as gateway:
        alice = gateway.alice
        (run,) = alice.get("/api/v1/training_runs")["training_runs"]
        assert (run["training_run_id"], run["lora_rank"]) == (model_id, 8)
        assert ids(alice, f"/api/v1/training_runs/{model_id}/checkpoints") == ["weights/b", "weights/a"]
        path = run["last_checkpoint"]["tinker_path"]
        assert alice.call("weights_info", tinker_path=path) == {
            "base_model": "cellgate/tiny",
            "is_lora": True,
            "lora_rank": 8,
            "train_unembed": True,
            "train_mlp": True,
            "train_attn": True,
            "optimizer_config": {"type": "adamw"},
        }
        made = alice.run("load_weights", session_id=alice.session(), model_seq_id=0, path=path, optimizer=True)
        assert made["optimizer_restored"] is True
        url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/b"
        assert [alice.http.delete(url).status_code for _ in range(2)] == [204, 404]
        assert ids(alice, "/api/v1/checkpoints") == ["weights/a"]
        assert gateway.bob.get("/api/v1/training_runs")["training_runs"] == []
        old = alice.post("optim_step", model_id=model_id, seq_id=100, adam_params={})
        assert (old.status_code, old.json()["type"]) == (404, "not_found")


def test_things_that_are_no_checkpoints_disturb_no_listing(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    save(alice, model_id, "kept")
    folder = gateway.root / model_id.replace(":", "~")
    (folder / "weights" / "file").write_text("x")
    (folder / "weights" / "dangling").symlink_to("../.versions/nowhere")
    (folder / "weights" / "plain").mkdir()
    (folder / "weights" / ".tmp-123").mkdir()
    (folder / "step_latest").mkdir()
    (gateway.root / "lost+found").mkdir()
    before = sorted(gateway.root.rglob("*"))
    assert ids(alice, "/api/v1/checkpoints") == ["weights/kept"]
    assert alice.get("/v1/checkpoints")["total"] == 1
    for name in ("file", "dangling", "plain"):
        path = f"tinker://{model_id}/weights/{name}"
        assert alice.post("weights_info", tinker_path=path).status_code in (404, 422), name
    assert sorted(gateway.root.rglob("*")) == before


def test_a_damaged_checkpoint_is_a_clear_refusal_and_can_be_deleted(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    save(alice, model_id, "good", "bad")
    path = f"tinker://{model_id}/weights/bad"
    folder = gateway.root / model_id.replace(":", "~") / "weights" / "bad"
    (folder / "manifest.json").write_bytes(b"\x00" * 100)
    answer = alice.post("weights_info", tinker_path=path)
    assert (answer.status_code, answer.json()["type"]) == (422, "checkpoint_unreadable")
    failed = alice.run("load_weights", model_id=model_id, seq_id=3, path=path, optimizer=True)
    assert failed["kind"] == "checkpoint_corrupt"
    assert ids(alice, "/api/v1/checkpoints") == ["weights/good"]
    assert alice.http.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/bad").status_code == 204


def test_sessions_are_listed_finished_and_beat_on(gateway: RunningGateway) -> None:
    alice = gateway.alice
    made = alice.call(
        "create_session", tags=["a"], user_metadata={"run": {"n": 1}}, sdk_version="0.38.0", display_name="mine"
    )
    session_id = made["session_id"]
    assert "warning_message" not in made or made["warning_message"] is None
    model_id = alice.new_model(session_id)
    assert alice.get("/api/v1/sessions")["sessions"] == [session_id]
    told = alice.get(f"/api/v1/sessions/{session_id}")
    assert (told["training_run_ids"], told["display_name"], told["user_metadata"]) == (
        [model_id],
        "mine",
        {"run": {"n": 1}},
    )
    finish = f"/api/v1/sessions/{session_id}/finish"
    for reason in ("success", "errored"):
        assert alice.http.post(finish, json={"reason": {"type": reason}, "detail": None}).is_success
    assert alice.call("session_heartbeat", session_id=session_id)["type"] == "session_heartbeat"


def test_a_session_is_warned_while_the_cell_restores_no_optimizer(directory: Path) -> None:
    with running_gateway(directory, cell=False) as gateway:
        gateway.attach_cell(no_load_optim=True)
        alice = gateway.alice
        made = alice.call("create_session", tags=[], sdk_version="0.38.0")
        assert "--no-load-optim" in made["warning_message"]
        model_id = alice.new_model(made["session_id"])
        save(alice, model_id, "a")
        path = f"tinker://{model_id}/weights/a"
        loaded = alice.run("load_weights", model_id=model_id, seq_id=2, path=path, optimizer=True)
        assert (loaded["optimizer_restored"], loaded["reason"]) == (False, "no_load_optim")


def test_a_session_is_told_what_concerns_its_tenant_alone(gateway: RunningGateway) -> None:
    gateway.scheduler.warnings["alice"] = "startup:train:0 has a fresh optimizer"
    told = [client.call("create_session", tags=[], sdk_version="0.38.0") for client in (gateway.alice, gateway.bob)]
    assert [made["warning_message"] for made in told] == ["startup:train:0 has a fresh optimizer", None]


def test_the_start_of_every_sdk_is_answered(gateway: RunningGateway) -> None:
    alice = gateway.alice
    config = alice.call("client/config", sdk_version="0.38.0")
    assert config["create_model_via_load_weights"] is True
    assert config["fwdbwd_max_chunk_bytes_count"] <= 5_000_000
    assert alice.call("client/dynamic_config", sdk_version="0.38.0")["refresh_interval_sec"] >= 10
    assert alice.call("telemetry", events=[], platform="x") == {"status": "accepted"}
    assert alice.get("/api/v1/healthz") == {"status": "ok"}
    assert alice.get("/api/v1/get_server_capabilities")["supported_models"] == [
        {"model_name": "cellgate/tiny", "max_context_length": 2048, "trainable": True, "sampleable": False}
    ]
    model_id = alice.new_model()
    assert alice.run("unload_model", model_id=model_id) == {"type": "unload_model", "model_id": model_id}
