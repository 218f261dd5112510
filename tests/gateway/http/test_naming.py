"""Names and addresses from outside: whatever is no name is refused, and nothing outside the model's folder changes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.gateway.http.running import Client, RunningGateway

NOT_NAMES = [
    "../x",
    "/etc/x",
    "a/b",
    ".",
    "..",
    "",
    "x%2f..%2fy",
    "x\0",
    "x\n",
    "x" * 300,
    "x ",
    "x.",
    " x",
    "-x",
    "ü",
    "x\\y",
    "weights/x",
    ".versions",
]
NOT_ADDRESSES = [
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1/x",
    "org/repo",
    "tinker://",
    "tinker://{model}/weights/../../x",
    "tinker://{model}/weights/a/b",
    "tinker://{model}/weights",
    "tinker://../weights/x",
    "tinker://{model}/../x",
    "tinker://{model}/weights/x\0",
    "tinker://{model}/.versions/x",
    "tinker://{model}/external_weights/x",
    "TINKER://{model}/weights/x",
    " tinker://{model}/weights/x",
    "",
]
GOOD_NAMES = ["lora", "lora_A", "default", "weight", "adapter", "model", "weights", "sampler_weights", "CON", "000001"]


def tree(root: Path) -> set[str]:
    """Everything under the root but a model's own folders and the staging area."""
    return {str(path.relative_to(root.parent)) for path in root.parent.rglob("*") if "~train~" not in str(path)}


def delete(client: Client, model_id: str, checkpoint_id: str) -> httpx.Response:
    """Over a URL that the client library has not cleaned up."""
    path = f"/api/v1/training_runs/{model_id}/checkpoints/{checkpoint_id}"
    url = client.http.base_url.copy_with(raw_path=path.encode("utf-8", "surrogateescape"))
    return client.http.delete(url)


def test_what_is_no_name_is_refused_everywhere_and_touches_nothing(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    alice.run("save_weights", model_id=model_id, seq_id=1, path="kept")
    before = tree(gateway.root)
    for seq_id, name in enumerate(NOT_NAMES, start=2):
        failed = alice.run("save_weights", model_id=model_id, seq_id=seq_id, path=name)
        assert (failed["category"], failed["kind"]) == ("user", "bad_command"), name
        answer = alice.http.post(f"/v1/models/{model_id}/checkpoints", json={"name": name})
        assert (answer.status_code, answer.json()["type"]) == (422, "invalid_request"), name
        answer = alice.post("weights_info", tinker_path=f"tinker://{model_id}/weights/{name}")
        assert (answer.status_code, answer.json()["type"]) == (422, "invalid_request"), name
    assert tree(gateway.root) == before
    assert [entry["checkpoint_id"] for entry in alice.get("/api/v1/checkpoints")["checkpoints"]] == ["weights/kept"]


def test_what_is_no_address_is_refused_everywhere_and_touches_nothing(gateway: RunningGateway) -> None:
    alice = gateway.alice
    session_id = alice.session()
    model_id = alice.new_model(session_id)
    alice.run("save_weights", model_id=model_id, seq_id=1, path="kept")
    before = tree(gateway.root)
    for number, form in enumerate(NOT_ADDRESSES, start=2):
        path = form.replace("{model}", model_id)
        for turn in ({"model_id": model_id, "seq_id": number}, {"session_id": session_id, "model_seq_id": number}):
            failed = alice.run("load_weights", path=path, optimizer=True, **turn)
            assert (failed["category"], failed["kind"]) == ("user", "bad_command"), path
        answers = [
            alice.post("weights_info", tinker_path=path),
            alice.http.post(f"/v1/models/{model_id}/load", json={"path": path, "load_optimizer": True}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["type"]) == (422, "invalid_request"), path
    assert tree(gateway.root) == before
    assert alice.run("optim_step", model_id=model_id, seq_id=len(NOT_ADDRESSES) + 2, adam_params={})["kind"]


@pytest.mark.parametrize(
    "checkpoint_id",
    ["../x", "weights/%2e%2e", "weights/a%2f..%2fkept", "weights/", "weights", "%00", "kept", "weights/kept/"],
)
def test_only_a_checkpoint_can_be_deleted(gateway: RunningGateway, checkpoint_id: str) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    path = alice.run("save_weights", model_id=model_id, seq_id=1, path="kept")["path"]
    assert delete(alice, model_id, checkpoint_id).status_code in (404, 405, 422)
    assert alice.call("weights_info", tinker_path=path)["is_lora"]


def test_a_checkpoint_of_another_kind_is_not_loaded_and_not_deleted(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    path = alice.run("save_weights", model_id=model_id, seq_id=1, path="x")["path"]
    sampler = path.replace("/weights/", "/sampler_weights/")
    failed = alice.run("load_weights", model_id=model_id, seq_id=2, path=sampler, optimizer=True)
    assert failed["category"] == "user"
    assert "sampler_weights" in failed["error"]
    answer = alice.http.post(f"/v1/models/{model_id}/load", json={"path": sampler, "load_optimizer": True})
    assert answer.status_code == 422
    assert "sampler_weights" in answer.json()["detail"]
    assert delete(alice, model_id, "sampler_weights/x").status_code == 404
    assert alice.call("weights_info", tinker_path=path)["is_lora"]


def test_names_that_mean_something_to_others_are_names_like_any(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    for seq_id, name in enumerate(GOOD_NAMES, start=1):
        saved = alice.run("save_weights", model_id=model_id, seq_id=seq_id, path=name)
        assert saved["path"] == f"tinker://{model_id}/weights/{name}"
    listed = alice.get(f"/api/v1/training_runs/{model_id}/checkpoints")["checkpoints"]
    assert [entry["checkpoint_id"] for entry in listed] == [f"weights/{name}" for name in reversed(GOOD_NAMES)]
    for seq_id, name in enumerate(GOOD_NAMES, start=len(GOOD_NAMES) + 1):
        path = f"tinker://{model_id}/weights/{name}"
        assert alice.run("load_weights", model_id=model_id, seq_id=seq_id, path=path, optimizer=True)["path"] == path
        assert delete(alice, model_id, f"weights/{name}").status_code == 204
    assert alice.get("/api/v1/checkpoints")["checkpoints"] == []
