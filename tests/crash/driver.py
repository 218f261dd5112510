"""A process that works on vaults in children, so that those can be traced, killed, limited and starved.

Everything is imported before the first fork, and a child waits for the word to go before it begins: so the calls to
the system that come after are those of the action, and nothing else's.

On standard input it takes one line for each child, `{"action": …, "root": …, …}`, answers with the child's process id,
lets it go at an empty line, and answers with what the child said and how it ended, each on a line of JSON. A child
waits with `readv` and speaks with `writev`, which the vault does not use.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.crash.churn import churn
from tests.crash.workload import ADDRESS, COMMAND, NEW, NEXT_EPOCH, contents, save, small_chunks, state_of
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import CheckpointDamaged, VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.listing import find_checkpoint, list_checkpoints
from trainer_cell.vault.manifest import read_manifest
from trainer_cell.vault.publish import sweep_staging
from trainer_cell.vault.recovery import settle_publish
from trainer_cell.vault.startup import recover
from trainer_cell.vault.verify import Wanted, read_tensors

_AT_THE_GATE = b"."


def load(vault: Vault) -> int | None:
    """The seed of what a load reads; unlike `state_of` it fails as the vault does."""
    found = find_checkpoint(vault, ADDRESS)
    if found is None:
        return None
    directory = vault.version_dir(found.version)
    lease = vault.lease(found.version)
    if found.problem is not None or lease is None:
        raise CheckpointDamaged(directory, found.problem or "is gone")
    with lease:
        manifest = read_manifest(directory, vault.disk)
        wanted = {key: Wanted(None, 0, record.shape) for key, record in manifest.tensors.items()}
        read = read_tensors(directory, manifest, wanted, disk=vault.disk)
    if read != contents(manifest.iteration):
        raise RuntimeError("a load returned what was never saved")
    return manifest.iteration


def act(job: dict[str, Any]) -> object:
    """What is said when it went well."""
    vault = Vault(Path(job["root"]))
    if job["action"] == "save":
        return save(
            vault,
            job.get("seed", NEW),
            CheckpointAddress.parse(job.get("address", ADDRESS.uri)),
            overwrite=job["overwrite"],
            shards=job["shards"],
        )
    if job["action"] == "load":
        return load(vault)
    if job["action"] == "delete":
        return delete_checkpoint(vault, ADDRESS)
    if job["action"] == "list":
        return [entry.address.uri for entry in list_checkpoints(vault)]
    if job["action"] == "churn":
        return churn(vault, Path(job["book"]), job["epoch"], job["seed"])
    if job["action"] == "start-up":
        vault.create()
        return recover(vault).errors
    assert job["action"] == "recover"
    vault.create()
    sweep_staging(vault)
    settled = settle_publish(vault, ADDRESS, COMMAND, job["overwrite"], NEXT_EPOCH)
    sweep_staging(vault)
    return settled and settled[0]


def in_child(job: dict[str, Any], gate: int, out: int) -> None:
    """From the first byte that it says, the child makes no call but its action's."""
    os.writev(out, [_AT_THE_GATE])
    os.readv(gate, [bytearray(1)])
    try:
        said: dict[str, Any] = {"done": act(job)}
    except VaultError as error:
        said = {"failed": type(error).__name__, "text": str(error)}
    os.writev(out, [json.dumps(said).encode()])
    os._exit(0)


def run(job: dict[str, Any]) -> None:
    gate, open_gate = os.pipe()
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(open_gate)
        os.close(back)
        in_child(job, gate, out)
    os.close(gate)
    os.close(out)
    assert os.read(back, 1) == _AT_THE_GATE
    say(str(child))
    sys.stdin.readline()
    with suppress(BrokenPipeError):  # killed already
        os.write(open_gate, b"!")
    os.close(open_gate)
    with open(back, "rb") as heard:
        said = heard.read()
    _, status = os.waitpid(child, 0)
    answer = json.loads(said) if said else {}
    if os.WIFSIGNALED(status):
        answer["signal"] = os.WTERMSIG(status)
    elif status != 0:
        answer["untyped"] = "its traceback is on standard error"
    say(json.dumps(answer))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(warm: Path) -> None:
    """warm: a new directory, to try everything out on before anybody looks."""
    vault = Vault(warm)
    vault.create()
    save(vault, NEW)
    assert state_of(vault) == load(vault) == NEW
    act({"action": "recover", "root": warm, "overwrite": True})
    act({"action": "start-up", "root": warm})
    delete_checkpoint(vault, ADDRESS)
    for line in sys.stdin:
        run(json.loads(line))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with small_chunks():
        serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
