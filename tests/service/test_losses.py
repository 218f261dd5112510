"""Losses as the SDK asks for them, of a real cell, and losses the client computes itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tinker
import torch

from tests.service.running import RunningService
from tests.service.state import State
from tests.service.test_resume import new_model, save
from tests.service.training import ADAM, batch, logprobs_of, train
from tests.trainer_cell.training.loss_formulas import CASES, derivable

pytestmark = pytest.mark.cell


def samples(model: tinker.TrainingClient, seed: int = 0) -> list[tinker.Datum]:
    """What a client has after sampling: log-probabilities not far from the model's own, advantages of either sign, and
    none for the first token."""
    generator = random.Random(seed)
    data = []
    for datum, said in zip(batch(0), logprobs_of(model.forward(batch(0), "cross_entropy").result()), strict=True):
        inputs = {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "logprobs": [value + generator.uniform(-1, 1) for value in said],
            "advantages": [0.0, *(generator.choice([-1.5, 0.5, 1.0]) for _ in said[1:])],
            "sequence_ratio_mask": [0.0, *(1.0 for _ in said[1:])],
        }
        data.append(tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
    return data


def tensors(datum: tinker.Datum) -> dict[str, torch.Tensor]:
    return {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "cross_entropy"])
def test_a_loss_is_the_sum_of_its_formula_over_the_logprobs_said(service: RunningService, name: str) -> None:
    case, model = CASES[name], new_model(service)
    data = samples(model)
    done = model.forward_backward(data, case.loss, dict(case.config)).result()
    said = [torch.tensor(values, dtype=torch.float64) for values in logprobs_of(done)]
    expected = sum(float(derivable(case, one, tensors(datum))) for one, datum in zip(said, data, strict=True))
    assert done.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    num_tokens = sum(map(len, said))
    assert ("clipped_tokens:sum" in done.metrics) == (case.loss in ("ppo", "cispo", "gspo"))
    assert 0 <= done.metrics.get("clipped_tokens:sum", 0) <= num_tokens
    assert model.optim_step(ADAM).result().metrics["grad_norm"] > 0


def moments(state: State) -> torch.Tensor:
    """Adam's first average after a step, which is the gradient but for a factor."""
    part = state.part("exp_avg")
    return torch.cat([torch.frombuffer(bytearray(part[name]), dtype=torch.float32) for name in sorted(part)])


def stepped(service: RunningService, accumulate: Callable[[tinker.TrainingClient], object]) -> torch.Tensor:
    model = new_model(service)
    train(model, range(1))
    model.load_state(model.save_state("trained").result().path).result()  # fresh moments
    accumulate(model)
    model.optim_step(ADAM).result()
    return moments(save(service, model, "stepped"))


def test_a_loss_of_the_clients_own_trains_as_the_built_in_one(one_rank: RunningService) -> None:
    """The client sends the derivative as weights, negative ones among them."""
    case = CASES["importance_sampling"]

    def own(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [derivable(case, one, tensors(datum)) for one, datum in zip(logprobs, data, strict=True)]
        total = torch.stack(losses).sum()
        return total, {"own_loss": float(total.detach())}

    told: dict[str, Any] = {}

    def custom(model: tinker.TrainingClient) -> None:
        told.update(model.forward_backward_custom(samples(model), own).result().metrics)

    def built_in(model: tinker.TrainingClient) -> None:
        told["loss"] = model.forward_backward(samples(model), case.loss).result().metrics["loss:sum"]

    def negated(model: tinker.TrainingClient) -> None:
        model.forward_backward_custom(samples(model), lambda *given: (-own(*given)[0], {})).result()

    mine, theirs, opposite = (stepped(one_rank, one) for one in (custom, built_in, negated))
    assert told["own_loss"] == pytest.approx(told["loss"], rel=1e-5)
    assert float((mine - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
    assert float((opposite + theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_a_loss_over_pairs_of_sequences_lowers_itself(one_rank: RunningService) -> None:
    model = new_model(one_rank)

    def preference(_data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -torch.nn.functional.logsigmoid(0.1 * (logprobs[0].sum() - logprobs[1].sum()))
        return loss, {"preference": float(loss.detach())}

    said = []
    for _ in range(4):
        said.append(model.forward_backward_custom(batch(3, size=2), preference).result().metrics["preference"])
        model.optim_step(ADAM).result()
    assert said == sorted(said, reverse=True)
    assert said[-1] < said[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("loss", "config", "reason"),
    [
        ("stable_reinforce", {"kl_coeff": 0.01}, "stable_reinforce is not supported"),
        ("custom", {"loss_id": "abc"}, "custom is not supported"),
        ("ppo", {"clip_low_threshold": 1.5}, "above clip_high_threshold"),
        ("ppo", {"epsilon": 0.2}, "ppo has no option 'epsilon'"),
        ("dro", None, "dro needs the option beta"),
    ],
)
def test_what_is_not_computed_is_a_users_error_that_says_so(
    one_rank: RunningService, loss: str, config: dict[str, Any] | None, reason: str
) -> None:
    model = new_model(one_rank)
    with pytest.raises(tinker.RequestFailedError, match=reason) as failure:
        model.forward_backward(samples(model), loss, config).result(timeout=30)  # type: ignore[arg-type]
    assert failure.value.category == "user"
