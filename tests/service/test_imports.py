"""POST /v1/imports against a whole service: what comes in is loaded and trained on as any checkpoint is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.service.conftest import Serve
from tests.service.running import API_KEY, OTHER_KEY, RunningService
from tests.service.state import read_state
from tests.service.training import train
from tests.trainer_cell.checkpoint.formats.native_writer import Job, write_native
from tests.trainer_cell.checkpoint.formats.states import COUNTERS, LAYERS, random_state, stored_bytes
from trainer_cell.training.base_models import prepare
from trainer_cell.training.model_shape import read_shape


def import_of(service: RunningService, path: Path, key: str = API_KEY, **fields: Any) -> dict[str, Any]:
    """The operation, once it is over."""
    with httpx.Client(base_url=service.url, headers={"X-API-Key": key}, timeout=90) as http:
        answer = http.post("/v1/imports", json={"path": str(path), "name": "one", **fields})
        assert answer.status_code == 202, answer.text
        while (operation := http.get(answer.headers["location"], params={"wait": 60}).json())["state"] not in (
            "succeeded",
            "failed",
        ):
            pass
    return dict(operation)


def test_a_jobs_adapter_is_imported_loaded_with_its_optimizer_and_trained_on(serve: Serve, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    base = prepare("tiny", tmp_path / "cache")
    state = random_state(base, LAYERS, dtype="fp32")
    write_native(allowed / "job", state, read_shape(base), Job(tp=2))
    service = serve("--import-dir", str(allowed), "--cache", str(tmp_path / "cache"))

    done = import_of(service, allowed / "job")
    assert done["error"] is None
    assert (done["result"]["step"], done["result"]["iteration"], done["result"]["has_optimizer"]) == (5, 9, True)
    path = done["result"]["path"]
    assert read_state(service.checkpoints, path).tensors == stored_bytes(state)

    model = service.client().create_training_client_from_state_with_optimizer(path)
    saved = read_state(service.checkpoints, model.save_state("as-loaded").result().path)
    assert saved.tensors == stored_bytes(state)
    assert (saved.step, saved.manifest.iteration) == (COUNTERS.step, COUNTERS.iteration)
    train(model, range(1))
    assert read_state(service.checkpoints, model.save_state("trained").result().path).step == COUNTERS.step + 1

    listed = httpx.get(f"{service.url}/v1/checkpoints", headers={"X-API-Key": OTHER_KEY}).json()
    assert listed["total"] == 0, "it is its importer's alone"
    assert service.stop() == 0
