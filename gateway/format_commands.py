"""`cellgate import` and `cellgate export`: checkpoints of other make in, ours out, beside a running service or without.

Both need what the cell needs: a program of the cell does the work, whose one-line errors and exit status are passed on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliToggleFlag

from gateway.scheduling.identity import tenant_digester
from gateway.settings import Directory, StateSettings, default_cache
from gateway.state_directory import DEFAULT_TENANT, StateDirectory, StateUnusable
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.listing import list_checkpoints

PROGRAM = "trainer_cell.checkpoint.formats"


def formats_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", PROGRAM, *arguments]


def formats_environment() -> dict[str, str]:
    """Without what is meant for the gateway, and without the current directory in the path of modules."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CELLGATE_")}
    return inherited | {"PYTHONSAFEPATH": "1"}


def _run(arguments: Sequence[str]) -> int:
    return subprocess.run(formats_command(*arguments), env=formats_environment(), check=False).returncode


def _refuse(reason: str) -> NoReturn:
    sys.stderr.write(f"cellgate: {reason}\n")
    sys.exit(1)


class ImportCheckpoint(StateSettings):
    """Make an ordinary checkpoint of native per-rank adapters, a torch_dist checkpoint or a PEFT adapter."""

    path: CliPositionalArg[Path] = Field(description="the directory to read; its content tells the format")
    model_id: str = Field(description="model the checkpoint will be of, as in tinker://MODEL_ID/weights/NAME")
    name: str = Field(description="name of the checkpoint")
    base_model: str = Field(description="what the adapter sits on: smollm2-135m, tiny, a directory, or a hub id")
    tenant: str = Field(DEFAULT_TENANT, description="who will own it")
    format: Literal["native", "torch_dist", "peft"] | None = Field(None, description="default: as the content tells")
    alpha: float | None = Field(None, description="of the adapter, where the files do not tell it")
    weights_only: CliToggleFlag[bool] = Field(False, description="leave the optimizer's state behind")
    no_load_optim: CliToggleFlag[bool] = Field(False, description="the same, under the name jobs know it by")
    trust_pickle: CliToggleFlag[bool] = Field(False, description="unpickle whatever is there: IT MAY RUN CODE")
    overwrite: CliToggleFlag[bool] = Field(False, description="replace a checkpoint of that name")
    cache: Directory = Field(default_factory=default_cache, description="directory of prepared base models")

    def cli_cmd(self) -> None:
        try:
            state = StateDirectory(self.state)
            state.create()
            digest = tenant_digester(state.tenant_secret())(self.tenant)
            self._refuse_others_model(digest)
        except (StateUnusable, VaultError, OSError) as error:
            _refuse(str(error))
        sys.exit(_run(self._arguments(digest)))

    def _refuse_others_model(self, digest: str) -> None:
        for listed in list_checkpoints(Vault(self.checkpoint_root), self.model_id):
            if listed.manifest is not None and listed.manifest.tenant_digest != digest:
                _refuse(f"model {self.model_id} is another tenant's; pick another --model-id")

    def _arguments(self, digest: str) -> list[str]:
        arguments = ["import", str(self.path.absolute()), "--model-id", self.model_id, "--name", self.name]
        arguments += ["--base-model", self.base_model, "--tenant-digest", digest]
        arguments += ["--checkpoints", str(self.checkpoint_root), "--cache", str(self.cache)]
        arguments += ["--format", self.format] if self.format else []
        arguments += ["--alpha", str(self.alpha)] if self.alpha is not None else []
        switches = ("weights_only", "no_load_optim", "trust_pickle", "overwrite")
        return arguments + [f"--{name.replace('_', '-')}" for name in switches if getattr(self, name)]


class ExportCheckpoint(StateSettings):
    """Write a checkpoint to a new directory: as a PEFT adapter (its weights), or as torch_dist (all of it)."""

    checkpoint: CliPositionalArg[str] = Field(description="a tinker:// address or a version's directory")
    format: Literal["peft", "torch_dist"]
    to: Path = Field(description="the directory to make; an existing one is refused")

    def cli_cmd(self) -> None:
        arguments = ["export", self.checkpoint, "--format", self.format, "--to", str(self.to.absolute())]
        sys.exit(_run([*arguments, "--checkpoints", str(self.checkpoint_root)]))
