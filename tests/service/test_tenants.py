"""Several people on one base model: each has what they would have alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker

from tests.service.running import OTHER_KEY, RunningService
from tests.service.state import State
from tests.service.test_resume import save
from tests.service.training import train

pytestmark = pytest.mark.cell

SHAPES = [
    {"rank": 8},
    {"rank": 4, "train_unembed": False},
    {"rank": 3, "train_mlp": False},
    {"rank": 16, "train_attn": False},
]


def job(service: RunningService, index: int) -> tuple[State, list[list[list[float]]]]:
    """Train, save, load back, train on; the final state and all logprobs on the way."""
    model = (
        service.client().create_lora_training_client(base_model="cellgate/tiny", seed=index, **SHAPES[index]).result()
    )
    seen = train(model, range(3), data_seed=index)
    saved = model.save_state("middle").result().path
    model.load_state_with_optimizer(saved).result()
    seen += train(model, range(3, 6), data_seed=index)
    return save(service, model, "end"), seen


def check_four_at_once(service: RunningService) -> None:
    """Each ends exactly where it ends alone."""
    alone = [job(service, index) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda index: job(service, index), range(4)))
    for (state_alone, seen_alone), (state_together, seen_together) in zip(alone, together, strict=True):
        assert seen_together == seen_alone
        assert state_together.same_as(state_alone)
    assert len({state.tensors[key] for state, _ in alone for key in list(state.tensors)[:1]}) == 4


def test_four_clients_at_once_each_end_exactly_where_they_end_alone(service: RunningService) -> None:
    check_four_at_once(service)


def test_another_tenants_checkpoint_is_as_good_as_not_there(one_rank: RunningService) -> None:
    model = one_rank.client().create_lora_training_client(base_model="cellgate/tiny", rank=4).result()
    saved = model.save_state("mine").result().path
    stranger = one_rank.client(OTHER_KEY)
    answers = []
    for path in (saved, saved.replace("/mine", "/absent")):
        with pytest.raises(tinker.RequestFailedError) as refused:
            stranger.create_training_client_from_state(path).result()
        answers.append(str(refused.value).replace("/absent", "/mine").rsplit("request", 1)[0])
    assert answers[0].split(saved)[0] == answers[1].split(saved)[0]
    assert stranger.create_rest_client().list_user_checkpoints().result().checkpoints == []
