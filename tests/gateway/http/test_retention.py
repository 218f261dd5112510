"""TTL, pins, quotas and sweeps over HTTP, with a fake cell that publishes real checkpoints."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.http.retained import age, ago, delete, listed, pin_url, saved, swept, ttl_url
from tests.gateway.http.running import RunningGateway, running_gateway
from tests.gateway.http.test_rest import new_model, wait, write
from trainer_cell.protocol.commands import LoadState
from trainer_cell.vault.deletion import doom
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.retention import Rules
from trainer_cell.vault.retention_record import NO_RECORD, RetentionRecord, write_records

QUOTA = 40_000


def test_a_ttl_is_set_shown_and_removed(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = new_model(alice)
    saved(alice, model_id)
    assert listed(alice)["one"]["expires"] is None
    answer = alice.http.put(ttl_url(model_id), json={"ttl_seconds": 7200})
    assert (answer.status_code, answer.content) == (204, b"")
    left = datetime.fromisoformat(listed(alice)["one"]["expires"]) - datetime.now(UTC)
    assert 7100 < left.total_seconds() < 7201
    (told,) = alice.get(f"/api/v1/training_runs/{model_id}/checkpoints")["checkpoints"]
    assert told["expires_at"] is not None
    assert alice.http.put(ttl_url(model_id), json={"ttl_seconds": None}).status_code == 204
    assert listed(alice)["one"]["expires"] is None


def test_a_ttl_given_with_the_save_can_be_removed_and_a_new_save_brings_its_own(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = new_model(alice)
    saved(alice, model_id, ttl_seconds=3600)
    assert listed(alice)["one"]["expires"] is not None
    alice.http.put(ttl_url(model_id), json={"ttl_seconds": None}).raise_for_status()
    assert listed(alice)["one"]["expires"] is None
    saved(alice, model_id, overwrite=True, ttl_seconds=7200)
    assert listed(alice)["one"]["expires"] is not None


@pytest.mark.parametrize("body", [{}, {"ttl_seconds": 3599}, {"ttl_seconds": 10**9}, {"ttl_seconds": "7200"}])
def test_a_ttl_that_is_none_is_refused_and_changes_nothing(
    shared_gateway: RunningGateway, body: dict[str, Any]
) -> None:
    alice = shared_gateway.alice
    model_id = new_model(alice)
    saved(alice, model_id)
    before = listed(alice)["one"]
    answer = alice.http.put(ttl_url(model_id), json=body)
    assert (answer.status_code, answer.json()["type"]) == (422, "invalid_request")
    assert listed(alice)["one"] == before


def test_what_is_not_there_or_anothers_has_neither_ttl_nor_pin(shared_gateway: RunningGateway) -> None:
    alice, bob = shared_gateway.alice, shared_gateway.bob
    model_id = new_model(alice)
    saved(alice, model_id)
    for client, name in ((bob, "one"), (alice, "absent")):
        answers = [
            client.http.put(ttl_url(model_id, name), json={"ttl_seconds": None}),
            client.http.put(pin_url(model_id, name)),
            client.http.delete(pin_url(model_id, name)),
        ]
        assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert alice.http.put(pin_url(model_id, kind="external")).status_code == 422
    assert not listed(alice)["one"]["is_pinned"]


def test_an_expired_checkpoint_is_gone_for_its_owner_at_once_and_its_name_is_free(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = new_model(alice)
    saved(alice, model_id, ttl_seconds=3600)
    path = f"tinker://{model_id}/weights/one"
    age(gateway, model_id, "one", expires=ago(seconds=1))
    assert listed(alice) == {}
    assert alice.post("weights_info", tinker_path=path).status_code == 404
    failed = write(alice, "POST", f"/v1/models/{model_id}/load", {"path": path, "load_optimizer": True})
    assert failed["error"]["kind"] == "checkpoint_not_found"
    assert delete(alice, model_id).status_code == 404
    assert alice.http.put(ttl_url(model_id), json={"ttl_seconds": None}).status_code == 404
    assert saved(alice, model_id)["state"] == "succeeded"
    assert list(listed(alice)) == ["one"]


def test_a_pinned_checkpoint_is_neither_deleted_nor_overwritten_until_it_is_unpinned(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = new_model(alice)
    saved(alice, model_id)
    pinned = alice.http.put(pin_url(model_id)).raise_for_status().json()
    assert pinned == listed(alice)["one"]
    assert pinned["is_pinned"] is True
    assert alice.http.put(pin_url(model_id)).is_success
    refused = delete(alice, model_id)
    assert (refused.status_code, refused.json()["type"]) == (422, "checkpoint_pinned")
    taken = saved(alice, model_id, overwrite=True)
    assert (taken["error"]["kind"], taken["error"]["category"]) == ("checkpoint_exists", "user")
    assert "pinned" in taken["error"]["message"]
    age(gateway, model_id, "one", expires=ago(seconds=1))
    assert listed(alice)["one"]["is_pinned"], "a pin holds whatever the TTL says"
    alice.http.put(ttl_url(model_id), json={"ttl_seconds": None}).raise_for_status()
    assert alice.http.delete(pin_url(model_id)).json()["is_pinned"] is False
    assert saved(alice, model_id, overwrite=True)["state"] == "succeeded"
    assert delete(alice, model_id).status_code == 204


def test_what_need_not_stay_is_swept_and_each_tenant_is_told_of_its_own(directory: Path) -> None:
    rules = Rules(replaced_grace_s=0, keep_last=2)
    with running_gateway(directory, rules=rules) as gateway:
        alice = gateway.alice
        first = swept(alice)
        assert (first["removed"], first["num_errors"]) == ([], 0)
        model_id = new_model(alice)
        for name in ("a", "b", "c"):
            saved(alice, model_id, name)
        alice.http.put(pin_url(model_id, "a")).raise_for_status()
        for _ in range(3):
            # An overwriting save asks for a sweep by itself: the interval is an hour.
            saved(alice, model_id, "c", overwrite=True)
        while len(list(gateway.root.glob("*/.versions/*"))) > 3:
            time.sleep(0.02)
        assert sorted(listed(alice)) == ["a", "b", "c"]
        alice.http.delete(pin_url(model_id, "a")).raise_for_status()
        saved(alice, model_id, "c", overwrite=True)
        while "a" in listed(alice):
            time.sleep(0.02)
        assert sorted(listed(alice)) == ["b", "c"]
        last = alice.get("/v1/retention")
        assert last["rules"] == {"replaced_grace_s": 0, "keep_last": 2, "keep_every": None}
        assert gateway.bob.get("/v1/retention")["last_sweep"]["removed"] == []


def test_a_sweep_leaves_a_checkpoint_that_is_being_loaded(directory: Path) -> None:
    with running_gateway(directory, rules=Rules(replaced_grace_s=0), sweep_interval_s=0.05) as gateway:
        assert gateway.cell is not None
        alice = gateway.alice
        model_id = new_model(alice)
        saved(alice, model_id, ttl_seconds=3600)
        hold = gateway.cell.hold_next(LoadState)
        path = f"tinker://{model_id}/weights/one"
        answer = alice.http.post(f"/v1/models/{model_id}/load", json={"path": path, "load_optimizer": True})
        hold.wait_reached()
        # By its TTL, which is read at each sweep.
        version = VersionName.parse(next(gateway.root.glob("*/.versions/*")).name)
        assert version is not None
        write_records(Vault(gateway.root), model_id, {version: RetentionRecord(expires=ago(seconds=1))})
        while not swept(alice)["in_use"]:
            time.sleep(0.02)
        assert listed(alice) == {}
        hold.release()
        assert wait(alice, answer.headers["location"])["state"] == "succeeded"
        # Once a snapshot of the model holds what was loaded.
        while list(gateway.root.glob("*/.versions/weights.*")):
            time.sleep(0.02)


def test_checkpoints_outlive_their_model_and_session_and_only_a_deletion_takes_them(directory: Path) -> None:
    with running_gateway(directory, rules=Rules(replaced_grace_s=0), sweep_interval_s=0.02) as gateway:
        alice = gateway.alice
        session = alice.session()
        model_id = alice.new_model(session)
        assert "path" in alice.run("save_weights", model_id=model_id, seq_id=1, path="a")
        alice.run("unload_model", model_id=model_id)
        alice.http.post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}}).raise_for_status()
        after = swept(alice, swept(alice)["ended"])
        assert after["removed"] == []
        path = f"tinker://{model_id}/weights/a"
        made = alice.run("load_weights", session_id=alice.session(), model_seq_id=0, path=path, optimizer=True)
        assert made["optimizer_restored"] is True


def test_a_version_removed_by_hand_is_told_clearly_and_settled_by_the_next_start(directory: Path) -> None:
    with running_gateway(directory, rules=Rules()) as gateway:
        alice = gateway.alice
        model_id = new_model(alice)
        saved(alice, model_id, "gone")
        saved(alice, model_id, "older")
        saved(alice, model_id, "older", overwrite=True)
        for name in ("gone", "older"):
            version = Vault(gateway.root).resolve(CheckpointAddress(model_id, "weights", name))
            shutil.rmtree(gateway.root / (version or ""))
        assert listed(alice) == {}
        path = f"tinker://{model_id}/weights/gone"
        assert alice.post("weights_info", tinker_path=path).json()["type"] == "checkpoint_unreadable"
        failed = write(alice, "POST", f"/v1/models/{model_id}/load", {"path": path, "load_optimizer": True})
        assert failed["error"]["kind"] == "checkpoint_corrupt"
        swept(alice)
    with running_gateway(directory, rules=Rules()) as gateway:
        alice = gateway.alice
        (entry,) = listed(alice).values()
        assert entry["name"] == "older"
        assert "is missing" in entry["note"]
        told = {one["what"] for one in alice.get("/v1/retention")["recovered"]}
        assert told == {"repaired", "unnamed"}
        assert gateway.bob.get("/v1/retention")["recovered"] == []
        assert alice.post("weights_info", tinker_path=path).status_code == 404
        assert delete(alice, model_id, "gone").status_code == 404
        assert delete(alice, model_id, "older").status_code == 204
        assert list(gateway.root.glob("*/.versions/*")) == []


def test_a_deletion_cut_short_is_ended_by_the_next_start_and_stays_ended(directory: Path) -> None:
    for at, name in enumerate(("a", "b")):
        with running_gateway(directory, rules=Rules()) as gateway:
            alice = gateway.alice
            model_id = new_model(alice)
            saved(alice, model_id, name)
            vault = Vault(gateway.root)
            address = CheckpointAddress(model_id, "weights", name)
            version = VersionName.parse((vault.resolve(address) or "").rpartition("/")[2])
            assert version is not None
            doom(vault, address, {version: NO_RECORD}, "deleted")
            if at:
                vault.public_path(address).unlink()
        with running_gateway(directory, rules=Rules()) as gateway:
            assert listed(gateway.alice) == {}
            assert delete(gateway.alice, model_id, name).status_code == 404
            assert list(gateway.root.glob("*/.versions/*")) == []
