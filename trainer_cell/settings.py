"""Every knob of a cell, read once at its start from the command line and `CELLGATE_CELL_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, CliToggleFlag, SettingsConfigDict


class CellSettings(BaseSettings):
    """Options of `torchrun … -m trainer_cell`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="CELLGATE_CELL_",
        cli_parse_args=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_prog_name="torchrun … -m trainer_cell",
    )

    base_model: str = Field(description="smollm2-135m, tiny, a directory, or a hub id")
    gateway_socket: Path = Field(description="unix socket of the gateway")
    checkpoints: Path = Field(description="checkpoint root, shared by all ranks and the gateway")
    cache: Path | None = Field(None, description="where prepared base models lie")
    tp: int = Field(1, ge=1, description="tensor-parallel ranks: each holds a part of every layer")
    pp: int = Field(1, ge=1, description="pipeline stages: each holds some of the layers")
    slots: int = Field(64, ge=1, description="most models resident at once")
    max_lora_rank: int = Field(128, ge=1)
    dtype: Literal["fp32", "bf16"] | None = Field(None, description="default: fp32 on CPU, bf16 on GPU")
    deterministic: bool | None = Field(None, description="default: on on CPU, off on GPU")
    # Toggles: the plain flags of argparse take every option that begins with --no- for "off".
    no_load_optim: CliToggleFlag[bool] = Field(
        False, description="loads never restore the optimizer, whatever a request says"
    )
    no_save_optim: CliToggleFlag[bool] = Field(False, description="checkpoints hold weights alone")
    recompute: CliToggleFlag[bool] = Field(
        False, description="layers compute again in the backward pass what they would keep: less memory, more work"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of each rank; default: cores / local ranks")
    save_buffers: int = Field(32, ge=1, description="most saves written at once; each has a copy of its model's state")
    save_memory_mb: int = Field(2048, ge=1, description="most memory of each rank for those copies, in MiB")
