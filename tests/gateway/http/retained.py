"""Short words for requests about checkpoints that come and go."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from tests.gateway.http.running import Client, RunningGateway
from tests.gateway.http.test_rest import write
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import MANIFEST_NAME, encode_manifest, read_manifest

QUOTA = 40_000


def saved(client: Client, model_id: str, name: str = "one", **others: Any) -> dict[str, Any]:
    return write(client, "POST", f"/v1/models/{model_id}/checkpoints", {"name": name, **others})


def listed(client: Client) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in client.get("/v1/checkpoints")["checkpoints"]}


def ttl_url(model_id: str, name: str = "one", kind: str = "weights") -> str:
    return f"/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl"


def pin_url(model_id: str, name: str = "one", kind: str = "weights") -> str:
    return f"/v1/models/{model_id}/checkpoints/{kind}/{name}/pin"


def delete(client: Client, model_id: str, name: str = "one") -> Any:
    return client.http.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/{name}")


def age(gateway: RunningGateway, model_id: str, name: str, **fields: Any) -> None:
    """Make a checkpoint say that it was saved, or expires, earlier than it did."""
    vault = Vault(gateway.root)
    directory = vault.version_dir(vault.resolve(CheckpointAddress(model_id, "weights", name)) or "")
    manifest = msgspec.structs.replace(read_manifest(directory), **fields)
    (directory / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def ago(**duration: float) -> str:
    return (datetime.now(UTC) - timedelta(**duration)).isoformat().replace("+00:00", "Z")


def swept(client: Client, after: str | None = None) -> dict[str, Any]:
    """The last sweep, once one has ended after that time."""
    while (last := client.get("/v1/retention")["last_sweep"]) is None or (after is not None and last["ended"] <= after):
        time.sleep(0.02)
    return dict(last)


def disk_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.glob("*~*/.versions/*/*"))
