"""Learning rates in plain REST: what the cell is told of them, and what is refused at the door."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.http.running import RunningGateway, forward_backward
from tests.gateway.http.test_rest import new_model, write
from trainer_cell.protocol.commands import AdamParams, CreateModel, LrSchedule, OptimStep

NEW = {"base_model": "tiny", "rank": 8, "seed": 7}
WARM = {"max_lr": 0.01, "warmup_steps": 2, "decay_steps": 10, "decay_style": "linear"}


def told(gateway: RunningGateway, kind: type[Any]) -> Any:
    """The last command of that kind."""
    assert gateway.cell is not None
    return [command for command in gateway.cell.commands if isinstance(command, kind)][-1]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (WARM, LrSchedule(0.01, 0.0, 2, 10, "linear")),
        (
            {**WARM, "decay_style": "WSD", "wsd_decay_steps": 3, "wsd_decay_style": "cosine", "init_lr": 0.001},
            LrSchedule(0.01, 0.0, 2, 10, "WSD", 0.001, 3, "cosine"),
        ),
        (
            {**WARM, "min_lr": 0.001, "start_wd": 0.0, "end_wd": 0.1, "wd_incr_steps": 9, "wd_incr_style": "linear"},
            LrSchedule(0.01, 0.001, 2, 10, "linear", 0.0, None, None, 0.0, 0.1, 9, "linear"),
        ),
    ],
)
def test_a_schedule_reaches_the_cell_as_it_was_given(
    gateway: RunningGateway, given: dict[str, Any], meant: LrSchedule
) -> None:
    assert write(gateway.alice, "POST", "/v1/models", {**NEW, "lr_scheduler": given})["state"] == "succeeded"
    assert told(gateway, CreateModel).lr_schedule == meant
    new_model(gateway.alice)
    assert told(gateway, CreateModel).lr_schedule is None


@pytest.mark.parametrize(
    ("given", "adam", "scheduled"),
    [
        ({}, AdamParams(0.0, 0.9, 0.95, 1e-12, 0.0, 0.0), ("learning_rate", "weight_decay")),
        ({"learning_rate": 0.5}, AdamParams(0.5, 0.9, 0.95, 1e-12, 0.0, 0.0), ("weight_decay",)),
        ({"weight_decay": 0.5, "beta1": 0.8}, AdamParams(0.0, 0.8, 0.95, 1e-12, 0.5, 0.0), ("learning_rate",)),
        (
            {"learning_rate": 0, "weight_decay": 0.5, "eps": 1e-8, "grad_clip_norm": 1},
            AdamParams(0.0, 0.9, 0.95, 1e-8, 0.5, 1.0),
            (),
        ),
    ],
)
def test_what_a_step_does_not_give_is_the_schedules(
    gateway: RunningGateway, given: dict[str, Any], adam: AdamParams, scheduled: tuple[str, ...]
) -> None:
    model_id = new_model(gateway.alice)
    gateway.alice.result(gateway.alice.send_forward_backward(forward_backward(model_id, 1)))
    stepped = write(gateway.alice, "POST", f"/v1/models/{model_id}/optim_step", given)
    assert (stepped["operation"], stepped["result"]["step"], stepped["result"]["iteration"]) == ("optim_step", 1, 1)
    command = told(gateway, OptimStep)
    assert (command.adam, command.scheduled) == (adam, scheduled)


def test_the_sdks_steps_give_every_rate_themselves(gateway: RunningGateway) -> None:
    model_id = new_model(gateway.alice)
    gateway.alice.result(gateway.alice.send_forward_backward(forward_backward(model_id, 1)))
    gateway.alice.run("optim_step", model_id=model_id, seq_id=2, adam_params={"learning_rate": 0.5})
    assert told(gateway, OptimStep).scheduled == ()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("", {**NEW, "lr_scheduler": {**WARM, "decay_style": "square"}}, "decay_style"),
        ("", {**NEW, "lr_scheduler": {**WARM, "max_lr": -1.0}}, "max_lr"),
        ("", {**NEW, "lr_scheduler": {**WARM, "decay_steps": 0}}, "decay_steps"),
        ("", {**NEW, "lr_scheduler": {"max_lr": 0.1}}, "decay_steps"),
        ("/x/optim_step", {"learning_rate": "0.1"}, "learning_rate"),
        ("/x/optim_step", {"beta1": 1.0}, "beta1"),
    ],
)
def test_what_is_no_rate_is_refused_by_name(
    shared_gateway: RunningGateway, path: str, body: dict[str, Any], named: str
) -> None:
    answer = shared_gateway.alice.http.post(f"/v1/models{path}", json=body)
    assert answer.status_code == 422
    assert named in answer.json()["detail"]
