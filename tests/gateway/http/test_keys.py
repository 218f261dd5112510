"""No route is open but health, and one tenant's things are to another as if they were not there."""

from __future__ import annotations

import httpx
import pytest

from tests.gateway.http.routes import all_routes
from tests.gateway.http.running import RunningGateway, forward_backward


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "tml-wrong"}, {"Authorization": "Bearer tml-wrong"}])
def test_every_route_but_health_answers_401_without_a_key_that_is_known(
    shared_gateway: RunningGateway, headers: dict[str, str]
) -> None:
    routes = all_routes(shared_gateway)
    assert len(routes) > 25
    with httpx.Client(base_url=shared_gateway.where.url, headers=headers) as stranger:
        for route in routes:
            answer = stranger.request(route.method, route.filled())
            assert answer.status_code == 401, route
            assert answer.json()["type"] == "unauthorized"
        for path in (
            "/openapi.json",
            "/docs",
            "/",
            "/api/v1/nothing",
            "/healthz/",
            "//healthz",
            "/healthz/../v1/models",
        ):
            assert stranger.get(path).status_code == 401, path


def test_health_is_open_to_all(shared_gateway: RunningGateway) -> None:
    routes = all_routes(shared_gateway, is_open=True)
    assert {route.path for route in routes} == {"/healthz", "/readyz", "/api/v1/healthz"}
    for route in routes:
        assert httpx.get(f"{shared_gateway.where.url}{route.path}").status_code == 200


def test_anothers_things_are_told_apart_from_nothing_by_no_answer(gateway: RunningGateway) -> None:
    alice, bob = gateway.alice, gateway.bob
    session_id = alice.session()
    model_id = alice.new_model(session_id)
    saved = alice.post("save_weights", model_id=model_id, seq_id=1, path="mine")
    path = alice.result(saved).json()["path"]
    request_id = saved.json()["request_id"]

    def tries(session_id: str, model_id: str, request_id: str) -> list[tuple[int, str]]:
        uri, checkpoints = f"tinker://{model_id}/weights/mine", f"/api/v1/training_runs/{model_id}/checkpoints"
        lora = {"rank": 4}
        answers = [
            bob.post("session_heartbeat", session_id=session_id),
            bob.http.post(f"/api/v1/sessions/{session_id}/finish", json={"reason": {"type": "success"}}),
            bob.http.get(f"/api/v1/sessions/{session_id}"),
            bob.post("create_model", session_id=session_id, model_seq_id=1, base_model="tiny", lora_config=lora),
            bob.post("load_weights", session_id=session_id, model_seq_id=1, path=uri, optimizer=True),
            bob.post("get_info", model_id=model_id),
            bob.post("unload_model", model_id=model_id),
            bob.send_forward_backward(forward_backward(model_id, 2)),
            bob.post("optim_step", model_id=model_id, seq_id=2, adam_params={}),
            bob.post("save_weights", model_id=model_id, seq_id=2, path="theirs"),
            bob.post("load_weights", model_id=model_id, seq_id=2, path=uri, optimizer=True),
            bob.post("retrieve_future", request_id=request_id),
            bob.post("weights_info", tinker_path=uri),
            bob.http.get(f"/api/v1/training_runs/{model_id}"),
            bob.http.get(checkpoints),
            bob.http.delete(f"{checkpoints}/weights/mine"),
            bob.http.get(f"/v1/models/{model_id}"),
            bob.http.delete(f"/v1/models/{model_id}"),
            bob.http.post(f"/v1/models/{model_id}/checkpoints", json={"name": "theirs"}),
            bob.http.post(f"/v1/models/{model_id}/load", json={"path": uri, "load_optimizer": True}),
            bob.http.get("/v1/checkpoints", params={"model_id": model_id}),
            bob.http.get(f"/v1/operations/{request_id}"),
        ]
        return [
            (answer.status_code, answer.text.replace(request_id, "R").replace(session_id, "S")) for answer in answers
        ]

    of_nothing = tries("0" * 24, f"{'0' * 24}:train:0", "future-" + "1" * 32)
    assert tries(session_id, model_id, request_id) == of_nothing
    assert {status for status, _ in of_nothing} == {404}

    # A load into a model of their own fails alike in its future.
    theirs = bob.new_model()
    loads = [
        bob.run("load_weights", model_id=theirs, seq_id=seq_id, path=one, optimizer=False)
        for seq_id, one in [(1, path), (2, path.replace("mine", "none"))]
    ]
    assert loads[0]["kind"] == loads[1]["kind"] == "checkpoint_not_found"
    assert loads[0]["error"] == loads[1]["error"].replace("none", "mine")

    assert bob.get("/api/v1/checkpoints")["checkpoints"] == []
    assert [run["training_run_id"] for run in bob.get("/api/v1/training_runs")["training_runs"]] == [theirs]
    assert session_id not in bob.get("/api/v1/sessions")["sessions"]
    assert alice.run("optim_step", model_id=model_id, seq_id=2, adam_params={})["kind"] == "no_gradients"
    assert alice.call("weights_info", tinker_path=path)["lora_rank"] == 8
