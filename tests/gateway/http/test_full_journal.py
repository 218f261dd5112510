"""The volume of the journal is full: nothing is accepted, nothing is lost, and polls are answered all the same."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.gateway.http.running import running_gateway
from tests.gateway.http.test_rest import new_model, write
from tests.gateway.store.test_full_disk import no_room


def test_requests_are_refused_with_503_and_run_once_when_they_are_sent_again_later(directory: Path) -> None:
    with running_gateway(directory) as gateway:
        assert gateway.cell is not None
        alice, url = gateway.alice, gateway.where.url
        model_id = new_model(alice)
        path = f"/v1/models/{model_id}/checkpoints"
        known = write(alice, "POST", path, {"name": "before"}, **{"idempotency-key": "before"})
        with no_room(directory):
            for _ in range(2):
                refused = alice.http.post(path, json={"name": "after"}, headers={"idempotency-key": "after"})
                assert (refused.status_code, refused.json()["type"]) == (503, "journal_unavailable")
                assert int(refused.headers["retry-after"]) > 0
            for body in ({"base_model": "tiny", "rank": 4}, {"base_model": "tiny", "rank": 8}):
                assert alice.http.post("/v1/models", json=body).status_code == 503
            session = alice.http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0"})
            assert session.status_code == 503
            # What was accepted before is answered, from its poll to its retry.
            assert alice.get(f"/v1/operations/{known['id']}")["state"] == "succeeded"
            again = alice.http.post(path, json={"name": "before"}, headers={"idempotency-key": "before"})
            assert again.json()["id"] == known["id"]
            ready = httpx.get(f"{url}/readyz")
            assert ready.status_code == 503
            assert "journal" in ready.json()["reason"]
            assert httpx.get(f"{url}/healthz").status_code == 200
        while not httpx.get(f"{url}/readyz").is_success:
            pass
        write(alice, "POST", path, {"name": "after"}, **{"idempotency-key": "after"})
        names = [entry["path"].rpartition("/")[2] for entry in alice.get("/v1/checkpoints")["checkpoints"]]
        assert sorted(names) == ["after", "before"]
        assert gateway.cell.count_saves(model_id) == 2
        assert [model["id"] for model in alice.get("/v1/models")["models"]] == [model_id]
