"""Wrong input is the caller's error: told in a sentence, and the model is usable and bit-identical afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import tinker

from tests.service.forgery import forge
from tests.service.rest import Rest
from tests.service.running import RunningService, datum
from tests.service.test_resume import new_model, save
from tests.service.training import ADAM, batch, train_step

pytestmark = pytest.mark.cell

TOKENS = [5, 6, 7, 8]


def with_inputs(**inputs: object) -> tinker.Datum:
    given = {"target_tokens": TOKENS[1:], "weights": [1.0, 1.0, 1.0], **inputs}
    kept = {key: value for key, value in given.items() if value is not None}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=kept)


BAD_DATA: dict[str, tinker.Datum] = {
    "no target_tokens": with_inputs(target_tokens=None),
    "no weights": with_inputs(weights=None),
    "too few weights": with_inputs(weights=[1.0, 1.0]),
    "too many targets": with_inputs(target_tokens=[1, 2, 3, 4]),
    "targets of the wrong dtype": with_inputs(
        target_tokens=tinker.TensorData(data=[1.0, 2.0, 3.0], dtype="float32", shape=[3])
    ),
    "target out of the vocabulary": with_inputs(target_tokens=[1, 2, 512]),
    "negative target": with_inputs(target_tokens=[1, 2, -1]),
    "token out of the vocabulary": datum([1, 2, 512, 3]),
    "negative token": datum([1, -2, 3, 4]),
    "no tokens": datum([1]),
    "NaN weight": with_inputs(weights=[1.0, math.nan, 1.0]),
    "infinite weight": with_inputs(weights=[1.0, math.inf, 1.0]),
    "longer than the context": datum([1] * 2050),
}
BAD_ADAM = [
    ("learning_rate", math.nan),
    ("learning_rate", -1e-3),
    ("learning_rate", math.inf),
    ("beta1", 1.0),
    ("beta2", -0.1),
    ("eps", -1e-8),
    ("weight_decay", math.nan),
    ("grad_clip_norm", -1.0),
]


@pytest.fixture(scope="module")
def model(one_rank: RunningService) -> tinker.TrainingClient:
    trained = new_model(one_rank)
    train_step(trained, 0)
    return trained


def refused(act: Callable[[], object]) -> str:
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as failure:
        act()
    message = str(failure.value)
    assert "Traceback" not in message
    assert ".py" not in message
    if isinstance(failure.value, tinker.RequestFailedError):
        assert failure.value.category == "user"
    else:
        assert 400 <= failure.value.status_code < 500
    return message


@pytest.mark.parametrize("fault", BAD_DATA)
def test_a_datum_with(one_rank: RunningService, model: tinker.TrainingClient, fault: str) -> None:
    before = save(one_rank, model, f"before-{fault.replace(' ', '-')}")
    data = [*batch(1), BAD_DATA[fault]]
    refused(lambda: model.forward_backward(data, "cross_entropy").result(timeout=30))
    assert save(one_rank, model, f"after-{fault.replace(' ', '-')}").same_as(before)
    refused(lambda: model.optim_step(ADAM).result(timeout=30))  # there is no gradient to step on


def test_an_unknown_loss(model: tinker.TrainingClient) -> None:
    assert "cross_entropy" in refused(lambda: model.forward_backward(batch(1), "made_up").result(timeout=30))


def test_bad_adam_params_are_refused_and_the_gradient_stays_for_a_step_with_good_ones(one_rank: RunningService) -> None:
    fresh, control = new_model(one_rank, seed=3), new_model(one_rank, seed=3)
    for each in (fresh, control):
        each.forward_backward(batch(1), "cross_entropy").result()
    for field, value in BAD_ADAM:
        params = tinker.AdamParams(**{**ADAM.model_dump(), field: value})
        refused(lambda params=params: fresh.optim_step(params).result(timeout=30))  # type: ignore[misc]
    for each in (fresh, control):
        each.optim_step(ADAM).result()
    assert save(one_rank, fresh, "end").same_as(save(one_rank, control, "end"))


@pytest.mark.parametrize(
    "options",
    [
        {"base_model": "cellgate/tiny", "rank": 0},
        {"base_model": "cellgate/tiny", "rank": -1},
        {"base_model": "cellgate/tiny", "rank": 100_000},
        {"base_model": "nobody/nothing", "rank": 8},
    ],
)
def test_a_model_that_cannot_be(one_rank: RunningService, options: dict[str, object]) -> None:
    refused(lambda: one_rank.client().create_lora_training_client(**options).result())  # type: ignore[arg-type]


def test_an_adapter_without_targets_is_refused(one_rank: RunningService) -> None:
    """The SDK refuses it before it sends anything, so this asks over plain REST."""
    targets = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    answer = Rest(one_rank).http.post("/v1/models", json={"base_model": "tiny", "rank": 8, **targets})
    assert (answer.status_code, answer.json()["type"]) == (422, "invalid_request")


def test_each_legal_set_of_targets_saves_loads_and_steps(one_rank: RunningService) -> None:
    for bits in range(1, 8):
        targets = {"train_attn": bool(bits & 1), "train_mlp": bool(bits & 2), "train_unembed": bool(bits & 4)}
        trained = (
            one_rank.client()
            .create_lora_training_client(base_model="cellgate/tiny", rank=3, seed=1, **targets)
            .result()
        )
        train_step(trained, 0)
        saved = trained.save_state("t").result().path
        resumed = one_rank.client().create_training_client_from_state_with_optimizer(saved).result()
        assert train_step(resumed, 1) == train_step(trained, 1)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "http://example.invalid/x",
        "org/repo",
        "tinker://",
        "tinker://a/weights/../../x",
        "tinker://a/weights/b/c",
        "tinker://a/weights/x\n",
        "tinker://a/weights/" + "x" * 300,
        "tinker://a/sampler_weights/x",
        "tinker://unknown:train:0/weights/x",
    ],
)
def test_a_path_that_names_no_checkpoint_of_ones_own(
    one_rank: RunningService, model: tinker.TrainingClient, path: str
) -> None:
    refused(lambda: model.load_state(path).result(timeout=30))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", ".", "..", "", "x%2f..%2fy", "x\n", "x" * 300, "x ", "x."])
def test_a_checkpoint_name(one_rank: RunningService, model: tinker.TrainingClient, name: str) -> None:
    before = sorted(one_rank.checkpoints.rglob("*"))
    refused(lambda: model.save_state(name).result(timeout=30))
    assert sorted(one_rank.checkpoints.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["lora", "lora_A", "default", "weight", "model", "weights", "sampler_weights", "000001"]
)
def test_a_name_that_means_something_elsewhere_is_a_name_like_any_other(
    one_rank: RunningService, model: tinker.TrainingClient, name: str
) -> None:
    state = save(one_rank, model, name)
    resumed = (
        one_rank.client()
        .create_training_client_from_state_with_optimizer(f"tinker://{state.manifest.model_id}/weights/{name}")
        .result()
    )
    assert save(one_rank, resumed, name).same_as(state)


def test_a_checkpoint_over_other_base_weights_or_of_another_rank_is_refused_by_name(
    one_rank: RunningService, model: tinker.TrainingClient
) -> None:
    before = save(one_rank, model, "fit")
    saved = f"tinker://{before.manifest.model_id}/weights/fit"
    foreign = forge(one_rank.checkpoints, saved, "foreign", base_digest="0" * 32)
    assert "base" in refused(lambda: model.load_state_with_optimizer(foreign).result(timeout=30))
    other = new_model(one_rank, rank=4)
    assert "rank" in refused(lambda: other.load_state_with_optimizer(saved).result(timeout=30))
    missing = forge(one_rank.checkpoints, saved, "missing", lambda key, t: None if "layers.2" in key else t)
    with pytest.raises(tinker.RequestFailedError, match=r"layers\.2"):
        model.load_state_with_optimizer(missing).result(timeout=30)
    nan = forge(one_rank.checkpoints, saved, "nan", lambda key, t: t * math.nan if key.endswith("exp_avg") else t)
    with pytest.raises(tinker.RequestFailedError, match="NaN"):
        model.load_state_with_optimizer(nan).result(timeout=30)
    assert save(one_rank, model, "still-fit").same_as(before)


def test_flipped_and_missing_bytes_are_found_and_named(one_rank: RunningService, model: tinker.TrainingClient) -> None:
    before = save(one_rank, model, "to-flip")
    saved = f"tinker://{before.manifest.model_id}/weights/to-flip"
    directory = (one_rank.checkpoints / before.manifest.model_id.replace(":", "~") / "weights" / "to-flip").resolve()
    shard = directory / "rank00000.safetensors"
    whole = shard.read_bytes()
    for broken in (whole[:-1], whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:], b""):
        shard.write_bytes(broken)
        with pytest.raises(tinker.RequestFailedError, match="rank00000"):
            model.load_state_with_optimizer(saved).result(timeout=30)
    shard.unlink()
    with pytest.raises(tinker.RequestFailedError, match="rank00000"):
        model.load_state_with_optimizer(saved).result(timeout=30)
    assert save(one_rank, model, "after-flips").same_as(before)
    shard.write_bytes(whole)
    model.load_state_with_optimizer(saved).result(timeout=30)


def test_a_model_with_nan_in_it_never_takes_the_place_of_a_checkpoint(service: RunningService) -> None:
    model = new_model(service)
    good = save(service, model, "kept")
    absurd = tinker.AdamParams(learning_rate=1e6, weight_decay=1e6)
    for _ in range(4):  # a gradient of zero, so that the decay alone moves the weights
        model.forward_backward([datum([1, 2, 3], [0.0, 0.0])], "cross_entropy").result()
        model.optim_step(absurd).result()
    with pytest.raises(tinker.RequestFailedError, match="NaN"):
        model.save_state("kept", overwrite=True).result(timeout=30)
    assert save_of(service, model, "kept").same_as(good)
    model.load_state_with_optimizer(f"tinker://{good.manifest.model_id}/weights/kept").result()
    assert save(service, model, "again").same_as(good)


def test_a_step_never_runs_on_the_gradient_of_half_a_window(service: RunningService) -> None:
    model, control = new_model(service), new_model(service)
    good = model.forward_backward(batch(0), "cross_entropy")
    bad = model.forward_backward([*batch(1), BAD_DATA["negative token"]], "cross_entropy")
    step = model.optim_step(ADAM)  # sent before anybody knew
    saved = model.save_state("unstepped")
    good.result()
    refused(bad.result)
    refused(step.result)
    saved.result()
    assert save(service, model, "after").same_as(save(service, control, "fresh"))
    assert train_step(model, 0) == train_step(control, 0)


def test_commands_sent_at_once_give_what_they_give_one_by_one(service: RunningService) -> None:
    at_once, one_by_one = new_model(service), new_model(service)
    pending = []
    for step in range(3):
        pending.append(at_once.forward_backward(batch(step), "cross_entropy"))
        pending.append(at_once.optim_step(ADAM))
        pending.append(at_once.save_state(f"s{step}"))
    for each in pending:
        each.result()
    for step in range(3):
        train_step(one_by_one, step)
        state = save(service, one_by_one, f"s{step}")
        assert save_of(service, at_once, f"s{step}").same_as(state)


def save_of(service: RunningService, model: tinker.TrainingClient, name: str):  # type: ignore[no-untyped-def]
    from tests.service.state import read_state

    return read_state(service.checkpoints, f"tinker://{model.get_info().model_id}/weights/{name}")
