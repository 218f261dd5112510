"""Quota, overwriting, deletion and the repairs of a start, with a real cell of two ranks and the real SDK."""

from __future__ import annotations

import pytest
import tinker

from tests.service.conftest import Serve
from tests.service.rest import Rest
from tests.service.state import read_state
from tests.service.training import train
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = [pytest.mark.cell, pytest.mark.full]

QUOTA = 4_000_000


def test_quota_deletion_and_the_repairs_of_a_start(serve: Serve) -> None:
    service = serve(
        "--tenant-quota-gb", str(QUOTA / 1e9), "--replaced-grace-s", "0", "--sweep-interval-s", "1", ranks=2
    )
    rest, vault = Rest(service), Vault(service.checkpoints)
    model = service.client().create_lora_training_client(base_model="cellgate/tiny", rank=8, seed=1).result()
    train(model, range(1))
    paths = []
    refused = None
    while refused is None:
        try:
            paths.append(model.save_state(f"n{len(paths)}").result().path)
        except tinker.RequestFailedError as failure:
            refused = failure
    assert f"of the {QUOTA} bytes" in str(refused)
    assert refused.category == "user"
    assert len(paths) > 2
    train(model, range(1))  # the model goes on
    used = rest.get("/v1/retention")["used_bytes"]
    assert QUOTA / 2 < used < QUOTA * 1.1
    for path in paths[1:]:
        address = CheckpointAddress.parse(path)
        url = f"/api/v1/training_runs/{address.model_id}/checkpoints/weights/{address.name}"
        assert rest.http.delete(url).status_code == 204
    assert rest.get("/v1/retention")["used_bytes"] < used / 2
    # Many overwrites fit where their sum would not: what they replace is collected.
    for _ in range(2 * len(paths)):
        over = model.save_state("over", overwrite=True).result().path
        while rest.get("/v1/retention")["used_bytes"] > QUOTA / 2:
            pass
    kept, lost = read_state(service.checkpoints, over), model.save_state("lost").result().path
    model_id = CheckpointAddress.parse(over).model_id
    service.end_clients()
    assert service.stop() == 0

    # As a crash between freeze and point leaves it, and as a bad disk does.
    vault.public_path(CheckpointAddress.parse(over)).unlink()
    damaged = vault.version_dir(vault.resolve(CheckpointAddress.parse(lost)) or "")
    next(damaged.glob("rank00001*")).unlink()
    service.start()
    rest = Rest(service)
    told = {(one["what"], one["path"]) for one in rest.get("/v1/retention")["recovered"]}
    assert told == {("adopted", over), ("unnamed", lost), ("quarantined", lost)}
    assert read_state(service.checkpoints, over).same_as(kept)
    resumed = service.client().create_training_client_from_state_with_optimizer(over).result()
    train(resumed, range(1))
    listed = rest.get("/v1/checkpoints")["checkpoints"]
    assert {one["name"] for one in listed if one["model_id"] == model_id} == {"n0", "over"}
