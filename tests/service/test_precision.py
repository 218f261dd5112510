"""FP32 masters and moments beneath BF16 weights: nothing below a BF16 step may be lost."""

from __future__ import annotations

import pytest
import tinker
import torch

from tests.service.forgery import forge, round_masters
from tests.service.running import RunningService
from tests.service.state import State, read_state
from tests.service.test_resume import new_model, save
from tests.service.training import batch, logprobs_of, train, train_step

pytestmark = pytest.mark.cell

SMALL = tinker.AdamParams(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)


def small_steps(model: tinker.TrainingClient, steps: range) -> None:
    for step in steps:
        model.forward_backward(batch(step), "cross_entropy")
        model.optim_step(SMALL).result()


def tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def below_bf16(state: State) -> int:
    """How many masters differ from their weight; every weight must be its master, rounded."""
    differing = 0
    for key, weight in state.part("weight").items():
        master = tensor(state.tensors[key.removesuffix("weight") + "master"], torch.float32)
        live = tensor(weight, torch.bfloat16)
        assert torch.equal(master.bfloat16(), live)
        differing += int((master != live.float()).sum())
    return differing


def test_updates_below_one_bf16_step_survive_a_resume(bf16: RunningService) -> None:
    uninterrupted, stopped = new_model(bf16), new_model(bf16)
    small_steps(uninterrupted, range(20))
    small_steps(stopped, range(10))
    saved = stopped.save_state("half").result().path
    assert below_bf16(read_state(bf16.checkpoints, saved)) > 1000
    resumed = bf16.client().create_training_client_from_state_with_optimizer(saved).result()
    small_steps(resumed, range(10, 20))
    assert save(bf16, resumed, "end").same_as(save(bf16, uninterrupted, "end"))


def test_masters_rounded_through_bf16_diverge_at_the_next_step(bf16: RunningService) -> None:
    """The control: a resume that rebuilt its masters would be seen."""
    model = new_model(bf16)
    small_steps(model, range(5))
    saved = model.save_state("exact").result().path
    rounded = forge(bf16.checkpoints, saved, "rounded", round_masters)
    ends = []
    for path in (saved, rounded):
        resumed = bf16.client().create_training_client_from_state_with_optimizer(path).result()
        small_steps(resumed, range(5, 6))
        ends.append(save(bf16, resumed, "end"))
    small_steps(model, range(5, 6))
    assert ends[0].same_as(save(bf16, model, "end"))
    assert not ends[1].same_as(ends[0])


def test_another_tenants_loads_never_touch_a_models_masters(bf16: RunningService) -> None:
    mine = new_model(bf16)
    small_steps(mine, range(3))
    before = save(bf16, mine, "before")
    other = new_model(bf16, seed=1)
    saved = other.save_state("theirs").result().path
    other.load_state(saved).result()
    with bf16.client() as leaving:
        leaving.create_lora_training_client(base_model="cellgate/tiny", rank=4).result()
    assert save(bf16, mine, "after").same_as(before)
    undisturbed = new_model(bf16)
    small_steps(undisturbed, range(3))
    assert train_step(mine, 3) == train_step(undisturbed, 3)


@pytest.mark.parametrize("step", [255, 2047])
def test_adams_step_counts_on_where_bf16_and_fp16_would_stop(bf16: RunningService, step: int) -> None:
    model = new_model(bf16)
    train(model, range(1))
    saved = model.save_state("early").result().path
    late = forge(bf16.checkpoints, saved, f"late{step}", step=step, iteration=step)
    resumed = bf16.client().create_training_client_from_state_with_optimizer(late).result()
    train(resumed, range(4))
    assert save(bf16, resumed, "end").step == step + 4


def test_all_masters_moments_and_weights_are_stored_once_and_in_full(
    service: RunningService, bf16: RunningService
) -> None:
    for running, parts in ((service, 3), (bf16, 4)):
        model = new_model(running)
        train(model, range(2))
        state = save(running, model, "whole")
        names = {key.rsplit("/", 1)[0] for key in state.tensors}
        assert len(state.tensors) == parts * len(names)
        assert state.step == 2
        for name in names:
            record = state.manifest.tensors[f"{name}/exp_avg"]
            assert record.dtype == "F32"
            assert len(state.tensors[f"{name}/exp_avg"]) == 4 * torch.Size(record.shape).numel()
        assert any(any(moment) for moment in state.part("exp_avg").values())


def test_a_forward_pass_moves_nothing(service: RunningService) -> None:
    model = new_model(service)
    train(model, range(1))
    before = save(service, model, "before")
    first = logprobs_of(model.forward(batch(5), "cross_entropy").result())
    assert first == logprobs_of(model.forward(batch(5), "cross_entropy").result())
    assert save(service, model, "after").same_as(before)
