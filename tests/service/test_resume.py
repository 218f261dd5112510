"""The resume contract, through the real SDK and plain REST, on one rank and on two."""

from __future__ import annotations

import pytest
import tinker

from tests.service.conftest import Serve
from tests.service.forgery import forge
from tests.service.rest import Rest
from tests.service.running import RunningService
from tests.service.state import State, read_state
from tests.service.training import ADAM, batch, probe, train, train_step

pytestmark = pytest.mark.cell


def save(service: RunningService, model: tinker.TrainingClient, name: str) -> State:
    return read_state(service.checkpoints, model.save_state(name).result().path)


def new_model(service: RunningService, seed: int = 7, rank: int = 8) -> tinker.TrainingClient:
    return service.client().create_lora_training_client(base_model="cellgate/tiny", rank=rank, seed=seed).result()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_after_sigkill_of_everything_a_model_takes_the_step_of_one_that_never_stopped(serve: Serve, ranks: int) -> None:
    service = serve(ranks=ranks)
    uninterrupted, live = new_model(service), new_model(service)
    train(uninterrupted, range(3)), train(live, range(3))
    saved = uninterrupted.save_state("saved").result().path
    weights_before = probe(uninterrupted)
    uninterrupted.forward_backward(batch(8), "cross_entropy").result()
    next_logprobs = train_step(uninterrupted, 3)
    after_both = save(service, uninterrupted, "after-both")
    live.forward_backward(batch(8), "cross_entropy").result()  # half of a window, when everything ends
    service.kill()

    service.start()
    # Who was there before goes on, gradients and all, and who comes anew goes on from the checkpoint.
    assert train_step(live, 3) == next_logprobs
    assert save(service, live, "after-both").same_as(after_both)
    client = service.client()
    via_load = client.create_training_client_from_state_with_optimizer(saved).result()
    in_place = client.create_lora_training_client(base_model="cellgate/tiny", rank=8, seed=99).result()
    in_place.load_state_with_optimizer(saved).result()
    for model in (via_load, in_place):
        assert save(service, model, "resumed").same_as(read_state(service.checkpoints, saved))
        assert probe(model) == weights_before
        assert train_step(model, 3) == next_logprobs
    after = save(service, via_load, "after")
    assert save(service, in_place, "after").same_as(after)
    assert not after.same_as(after_both)

    weights_only = client.create_training_client_from_state(saved).result()
    assert probe(weights_only) == weights_before
    train_step(weights_only, 3)
    assert save(service, weights_only, "after").part("weight") != after.part("weight")
    assert service.stop() == 0


def test_plain_rest_restores_the_very_state_and_says_what_it_restored(service: RunningService) -> None:
    trained = new_model(service)
    train(trained, range(2))
    saved = trained.save_state("rest").result().path
    rest = Rest(service)
    created = rest.run("POST", "/v1/models", {"base_model": "tiny", "rank": 8, "seed": 3})
    model = created["result"]["model_id"]
    loaded = rest.run("POST", f"/v1/models/{model}/load", {"path": saved, "load_optimizer": True})
    assert loaded["state"] == "succeeded"
    assert loaded["result"]["optimizer_restored"] is True
    assert loaded["result"]["step"] == 2
    written = rest.run("POST", f"/v1/models/{model}/checkpoints", {"name": "again"})
    state = read_state(service.checkpoints, written["result"]["path"])
    assert state.same_as(read_state(service.checkpoints, saved))
    loaded = rest.run("POST", f"/v1/models/{model}/load", {"path": saved, "load_optimizer": False})
    assert loaded["result"]["optimizer_restored"] is False
    assert loaded["result"]["reason"] == "not_requested"
    missing = rest.http.post(f"/v1/models/{model}/load", json={"path": saved})
    assert missing.status_code == 422


def test_a_weights_only_load_starts_adam_afresh_and_keeps_the_iteration(service: RunningService) -> None:
    trained = new_model(service)
    train(trained, range(3))
    saved = trained.save_state("wo").result().path
    trained.load_state(saved).result()  # in mid-run: the live moments go
    state = save(service, trained, "reloaded")
    assert state.step == 0
    assert state.manifest.iteration == 3
    assert all(not any(moment) for part in ("exp_avg", "exp_avg_sq") for moment in state.part(part).values())
    assert state.part("weight") == read_state(service.checkpoints, saved).part("weight")
    train_step(trained, 3)
    state = save(service, trained, "stepped")
    assert (state.step, state.manifest.iteration) == (1, 4)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_step_with_lr_0_after_a_load_leaves_the_weights_bit_identical(
    bf16: RunningService, with_optimizer: bool
) -> None:
    """Stale masters would write the adapter from before the load back over it."""
    trained = new_model(bf16)
    train(trained, range(3))
    saved = trained.save_state("lr0").result().path
    other = new_model(bf16, seed=1)
    train(other, range(2), data_seed=1)
    load = other.load_state_with_optimizer if with_optimizer else other.load_state
    load(saved).result()
    other.forward_backward(batch(0), "cross_entropy").result()
    still = tinker.AdamParams(learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
    other.optim_step(still).result()
    assert save(bf16, other, "still").part("weight") == read_state(bf16.checkpoints, saved).part("weight")


def test_masters_that_are_not_the_weights_own_show_at_a_step_with_lr_0(bf16: RunningService) -> None:
    """The control of the test above: a load that left stale masters would be seen."""
    trained = new_model(bf16)
    train(trained, range(1))
    saved = trained.save_state("own").result().path
    stale = forge(bf16.checkpoints, saved, "stale", lambda key, t: t + 0.5 if key.endswith("/master") else t)
    loaded = bf16.client().create_training_client_from_state_with_optimizer(stale).result()
    loaded.forward_backward(batch(0), "cross_entropy").result()
    loaded.optim_step(tinker.AdamParams(learning_rate=0.0, weight_decay=0.0)).result()
    assert save(bf16, loaded, "moved").part("weight") != read_state(bf16.checkpoints, saved).part("weight")


def test_loading_one_model_leaves_another_bit_identical(bf16: RunningService) -> None:
    kept = new_model(bf16)
    train(kept, range(3))
    before = save(bf16, kept, "before")
    other = new_model(bf16, seed=1)
    train(other, range(2), data_seed=1)
    saved = other.save_state("other").result().path
    other.load_state_with_optimizer(saved).result()
    other.load_state(saved).result()
    assert save(bf16, kept, "after").same_as(before)


def test_gradients_pending_at_a_save_are_neither_stored_nor_dropped(service: RunningService) -> None:
    with_save, without = new_model(service), new_model(service)
    for model in (with_save, without):
        model.forward_backward(batch(0), "cross_entropy").result()
    saved = with_save.save_state("pending").result().path
    for model in (with_save, without):
        model.optim_step(ADAM).result()
    assert save(service, with_save, "stepped").same_as(save(service, without, "stepped"))
    loaded = service.client().create_training_client_from_state_with_optimizer(saved).result()
    with pytest.raises(tinker.RequestFailedError):
        loaded.optim_step(ADAM).result()
    assert save(service, loaded, "unmoved").same_as(read_state(service.checkpoints, saved))


def test_a_checkpoint_from_before_the_first_step_is_a_state_like_any_other(service: RunningService) -> None:
    fresh = new_model(service, seed=5)
    saved = fresh.save_state("zero").result().path
    never_saved = new_model(service, seed=5)
    loaded = service.client().create_training_client_from_state_with_optimizer(saved).result()
    assert train_step(loaded, 0) == train_step(never_saved, 0)
    assert save(service, loaded, "one").same_as(save(service, never_saved, "one"))


def test_resuming_again_and_again_counts_each_step_once(service: RunningService) -> None:
    model = new_model(service)
    steps = []
    for generation in range(3):
        train(model, range(generation * 2, generation * 2 + 2))
        saved = model.save_state(f"generation{generation}").result().path
        live = probe(model)
        model = service.client().create_training_client_from_state_with_optimizer(saved).result()
        assert probe(model) == live
        steps.append(save(service, model, "at-once").step)
    assert steps == [2, 4, 6]


@pytest.mark.full
def test_the_optimizer_can_be_kept_out_of_loads_and_of_saves_by_the_operator(serve: Serve) -> None:
    service = serve()
    trained = new_model(service)
    train(trained, range(2))
    full = trained.save_state("full").result().path
    assert service.stop() == 0

    service = serve("--no-load-optim", "--no-save-optim")
    rest = Rest(service)
    model = rest.run("POST", "/v1/models", {"base_model": "tiny", "rank": 8, "seed": 3})["result"]["model_id"]
    loaded = rest.run("POST", f"/v1/models/{model}/load", {"path": full, "load_optimizer": True})["result"]
    assert (loaded["optimizer_restored"], loaded["reason"]) == (False, "no_load_optim")
    assert (loaded["step"], loaded["iteration"]) == (0, 2)
    client = service.client().create_training_client_from_state_with_optimizer(full).result()
    train_step(client, 2)
    bare = client.save_state("bare").result().path
    state = read_state(service.checkpoints, bare)
    assert not state.manifest.has_optimizer
    assert {key.rsplit("/", 1)[1] for key in state.tensors} == {"weight"}
    assert service.stop() == 0

    service = serve()
    mine = new_model(service)
    train_step(mine, 0)
    before = save(service, mine, "before")
    with pytest.raises(tinker.RequestFailedError, match="no optimizer state"):
        mine.load_state_with_optimizer(bare).result()
    assert save(service, mine, "after").same_as(before)
    mine.load_state(bare).result()
    assert save(service, mine, "loaded").part("weight") == state.part("weight")
    assert service.stop() == 0
