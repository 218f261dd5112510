"""A tenant's quota: what counts, when a save is refused, and what makes room again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.http.retained import delete, disk_bytes, listed, saved
from tests.gateway.http.running import RunningGateway, running_gateway
from tests.gateway.http.test_rest import new_model, wait
from trainer_cell.protocol.commands import SaveState

QUOTA = 40_000


@pytest.fixture
def small(directory: Path) -> Iterator[RunningGateway]:
    with running_gateway(directory, quota_bytes=QUOTA) as running:
        yield running


def test_a_save_over_the_quota_fails_with_the_figures_and_deleting_makes_room(small: RunningGateway) -> None:
    alice = small.alice
    model_id = new_model(alice)
    num_saved = 0
    while (done := saved(alice, model_id, f"n{num_saved}"))["state"] == "succeeded":
        num_saved += 1
    assert num_saved > 3
    error = done["error"]
    used = alice.get("/v1/retention")["used_bytes"]
    assert (error["kind"], error["category"]) == ("quota_exceeded", "user")
    assert f"{used} of the {QUOTA} bytes" in error["message"]
    assert used == disk_bytes(small.root)
    # The tensors of the last one fitted, its manifest may have gone over.
    assert used < QUOTA + 5000
    assert len(listed(alice)) == num_saved, "what failed is not listed"
    theirs = new_model(small.bob)
    assert saved(small.bob, theirs)["state"] == "succeeded", "a quota is a tenant's own"
    per_save = used // num_saved
    for name in ("n0", "n1"):
        assert delete(alice, model_id, name).status_code == 204
    assert alice.get("/v1/retention")["used_bytes"] == pytest.approx(used - 2 * per_save, abs=100)
    assert saved(alice, model_id, "again")["state"] == "succeeded"


def test_replaced_versions_count_and_a_delete_frees_them_too(small: RunningGateway) -> None:
    alice = small.alice
    model_id = new_model(alice)
    while saved(alice, model_id, overwrite=True)["state"] == "succeeded":
        pass
    assert list(listed(alice)) == ["one"]
    assert disk_bytes(small.root) > QUOTA / 2
    assert delete(alice, model_id).status_code == 204
    assert disk_bytes(small.root) == 0
    assert saved(alice, model_id)["state"] == "succeeded"


def test_after_a_restart_what_is_on_disk_still_counts(directory: Path) -> None:
    with running_gateway(directory, quota_bytes=QUOTA) as gateway:
        saved(gateway.alice, new_model(gateway.alice))
        used = gateway.alice.get("/v1/retention")["used_bytes"]
        assert used == disk_bytes(gateway.root)
    with running_gateway(directory, quota_bytes=used) as gateway:
        assert gateway.alice.get("/v1/retention")["used_bytes"] == used
        assert saved(gateway.alice, new_model(gateway.alice))["error"]["kind"] == "quota_exceeded"


def test_a_save_under_way_counts_as_soon_as_its_size_is_known(small: RunningGateway) -> None:
    assert small.cell is not None
    alice = small.alice
    model_id = new_model(alice)
    hold = small.cell.hold_next_publish()
    answer = alice.http.post(f"/v1/models/{model_id}/checkpoints", json={"name": "one"})
    hold.wait_reached()
    while not (reserved := alice.get("/v1/retention")["used_bytes"]):
        pass
    assert disk_bytes(small.root) == 0
    hold.release()
    assert wait(alice, answer.headers["location"])["state"] == "succeeded"
    assert alice.get("/v1/retention")["used_bytes"] == disk_bytes(small.root) > reserved


def test_two_saves_under_way_at_once_do_not_both_take_the_last_room(directory: Path) -> None:
    with running_gateway(directory, quota_bytes=150) as gateway:
        assert gateway.cell is not None
        alice = gateway.alice
        models = [new_model(alice), new_model(alice)]
        hold = gateway.cell.hold_next_publish()
        first = alice.http.post(f"/v1/models/{models[0]}/checkpoints", json={"name": "one"})
        hold.wait_reached()
        refused = saved(alice, models[1])
        assert refused["error"]["kind"] == "quota_exceeded"
        hold.release()
        assert wait(alice, first.headers["location"])["state"] == "succeeded"
        assert delete(alice, models[0]).status_code == 204
        assert saved(alice, models[1])["state"] == "succeeded"


def test_without_a_quota_nothing_is_asked_of_the_cell(gateway: RunningGateway) -> None:
    assert gateway.cell is not None
    saved(gateway.alice, new_model(gateway.alice))
    (command,) = [command for command in gateway.cell.commands if isinstance(command, SaveState)]
    assert command.quota is None
    told = gateway.alice.get("/v1/retention")
    assert (told["quota_bytes"], told["rules"], told["last_sweep"]) == (None, None, None)
