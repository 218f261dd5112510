"""A learning-rate schedule from plain REST to the ranks, into a checkpoint and out of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.http.running import forward_backward
from tests.service.rest import Rest
from tests.service.running import RunningService

pytestmark = pytest.mark.cell

SCHEDULE = {"max_lr": 0.01, "min_lr": 0.001, "warmup_steps": 2, "decay_steps": 4, "decay_style": "linear"}
NEW = {"base_model": "tiny", "rank": 8, "seed": 3}


class Training:
    """A model as a program without the SDK trains it."""

    def __init__(self, service: RunningService, model_id: str) -> None:
        self.rest, self.model_id, self._seq_id = Rest(service), model_id, 0

    def step(self, **adam: float) -> dict[str, Any]:
        """One forward_backward and one optim_step; the operation."""
        self._seq_id += 1
        sent = self.rest.http.post(
            "/api/v1/forward_backward",
            content=forward_backward(self.model_id, self._seq_id, length=9),
            headers={"Content-Type": "application/x-protobuf"},
        )
        self.rest.wait(f"/v1/operations/{sent.raise_for_status().json()['request_id']}")
        return self.rest.run("POST", f"/v1/models/{self.model_id}/optim_step", dict(adam))

    def rate(self) -> float:
        return float(self.step()["result"]["metrics"]["learning_rate"])


def new_model(service: RunningService, **more: Any) -> Training:
    made = Rest(service).run("POST", "/v1/models", {**NEW, **more})
    return Training(service, made["result"]["model_id"])


def test_a_schedule_is_followed_and_goes_on_in_another_model(one_rank: RunningService) -> None:
    model = new_model(one_rank, lr_scheduler=SCHEDULE)
    assert [model.rate() for _ in range(3)] == pytest.approx([0.0, 0.005, 0.01])
    model.step(learning_rate=0.5)
    saved = model.rest.run("POST", f"/v1/models/{model.model_id}/checkpoints", {"name": "middle"})["result"]["path"]
    resumed = new_model(one_rank)
    loaded = resumed.rest.run("POST", f"/v1/models/{resumed.model_id}/load", {"path": saved, "load_optimizer": True})
    assert (loaded["result"]["scheduler_restored"], loaded["result"]["iteration"]) == (True, 4)
    assert [resumed.rate() for _ in range(2)] == pytest.approx([0.001, 0.001])
    [checkpoint] = resumed.rest.get(f"/v1/checkpoints?model_id={model.model_id}")["checkpoints"]
    assert checkpoint["has_scheduler"] is True


def test_without_a_schedule_a_step_must_name_its_rate(one_rank: RunningService) -> None:
    model = new_model(one_rank)
    refused = model.step()
    assert (refused["error"]["kind"], refused["error"]["category"]) == ("bad_command", "user")
    assert "learning_rate" in refused["error"]["message"]
    assert model.step(learning_rate=0.25)["result"]["metrics"]["learning_rate"] == 0.25


def test_a_schedule_that_makes_no_sense_makes_no_model(one_rank: RunningService) -> None:
    made = Rest(one_rank).run("POST", "/v1/models", {**NEW, "lr_scheduler": {**SCHEDULE, "warmup_steps": 4}})
    assert (made["error"]["kind"], made["error"]["category"]) == ("bad_command", "user")
    assert "warmup_steps" in made["error"]["message"]
