"""Every option of the gateway's process and of `cellgate serve`: command line over `CELLGATE_*` over defaults.

Built once at the process edge and passed down as plain values.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_serializer, field_validator
from pydantic_settings import BaseSettings, CliSuppress, CliToggleFlag, NoDecode, SettingsConfigDict

from gateway.scheduling.snapshot_rules import SnapshotRules
from trainer_cell.vault.retention import Rules

_KEY = re.compile(r"tml-[A-Za-z0-9._~+/-]+")
# Where Megatron tells which iteration of a checkpoint directory is the newest.
TRACKER = "latest_checkpointed_iteration.txt"

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


Directory = Annotated[Path, AfterValidator(_absolute)]


def _xdg(variable: str, fallback: str) -> Path:
    named = os.environ.get(variable, "")
    # The XDG specification says that a relative value is to be ignored.
    root = Path(named) if named.startswith("/") else Path.home() / fallback
    return root / "cellgate"


def default_state() -> Path:
    """`$XDG_STATE_HOME/cellgate`, else `~/.local/state/cellgate`."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/cellgate`, else `~/.cache/cellgate`: what can be made again, shared by all states."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def split_api_key(pair: str) -> tuple[str, str]:
    """`KEY=TENANT` → (key, tenant); raises `ValueError`, which never repeats the key."""
    key, separator, tenant = pair.strip().rpartition("=")
    if not separator:
        raise ValueError("an API key is given as KEY=TENANT")
    if not _KEY.fullmatch(key):
        raise ValueError(f"the API key of tenant {tenant!r} must start with 'tml-' and hold no spaces, commas or '='")
    if not _TENANT.fullmatch(tenant):
        raise ValueError(f"{tenant!r} is no tenant name: letters, digits and . _ @ -, at most 64")
    return key, tenant


class StateSettings(BaseSettings):
    """Where things lie on disk."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="CELLGATE_",
        hide_input_in_errors=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_show_env_vars=True,
    )

    state: Directory = Field(default_factory=default_state, description="directory of the service's own state")
    checkpoints: Directory | None = Field(None, description="checkpoint root; default: STATE/checkpoints")

    @property
    def checkpoint_root(self) -> Path:
        return self.checkpoints or self.state / "checkpoints"

    def shown(self) -> dict[str, object]:
        """What is in force, for people: JSON values, secrets masked."""
        return {**self.model_dump(mode="json"), "checkpoints": str(self.checkpoint_root)}


class RetentionSettings(StateSettings):
    """How long checkpoints stay."""

    replaced_grace_s: float = Field(600.0, ge=0, description="how long a version stays after a save replaced it, in s")
    keep_last: int | None = Field(None, ge=1, description="keep each model's so many latest training checkpoints")
    keep_every: int | None = Field(None, ge=1, description="keep training checkpoints at multiples of this iteration")

    @property
    def rules(self) -> Rules:
        return Rules(self.replaced_grace_s, self.keep_last, self.keep_every)


class GatewaySettings(RetentionSettings):
    """The HTTP service."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8787, ge=0, le=65535, description="port to listen on; 0 takes a free one and prints it")
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="KEY=TENANT, repeatable; keys start with tml-; without any, one is generated and printed"
    )
    gateway_socket: Directory | None = Field(
        None, description="unix socket the trainer cell dials, in a directory of its own; default: under STATE/run"
    )
    import_dir: Annotated[tuple[Directory, ...], NoDecode] = Field(
        (), description="directory clients may import from, with all below it; repeatable"
    )
    max_body_mb: int = Field(64, ge=1, le=1000, description="largest request body, after decompression, in MiB")
    tenant_quota_gb: float | None = Field(
        None, gt=0, description="most bytes of checkpoints a tenant may have on disk, in 10^9; default: no limit"
    )
    snapshot_steps: int = Field(20, ge=1, description="a recovery snapshot of a model at least every so many steps")
    snapshot_s: float = Field(300.0, gt=0, description="and so many seconds after its first step since the last one")
    idle_model_days: float = Field(
        30.0, gt=0, description="a model that nobody used for so long is unloaded; its checkpoints stay"
    )
    sweep_interval_s: float = Field(60.0, gt=0, description="between two collections of what need not stay, in seconds")
    stop_grace_s: float = Field(30.0, gt=0, description="longest orderly stop, in seconds; what is left is killed")

    @field_validator("api_key", "import_dir", mode="before")
    @classmethod
    def _split_list(cls, given: object) -> object:
        if isinstance(given, str):
            return tuple(part for part in given.split(",") if part.strip())
        return given

    @field_validator("api_key")
    @classmethod
    def _check_pairs(cls, pairs: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        tenants: dict[str, str] = {}
        for pair in pairs:
            key, tenant = split_api_key(pair.get_secret_value())
            if tenants.setdefault(key, tenant) != tenant:
                raise ValueError(f"one API key cannot be of two tenants, {tenants[key]!r} and {tenant!r}")
        return pairs

    @field_serializer("api_key")
    def _mask(self, pairs: tuple[SecretStr, ...]) -> list[str]:
        return [f"tml-********={split_api_key(pair.get_secret_value())[1]}" for pair in pairs]

    @property
    def snapshot_rules(self) -> SnapshotRules:
        return SnapshotRules(steps=self.snapshot_steps, seconds=self.snapshot_s)

    @property
    def tenant_quota_bytes(self) -> int | None:
        return None if self.tenant_quota_gb is None else round(self.tenant_quota_gb * 1e9)

    @property
    def api_keys(self) -> dict[str, str]:
        """Key → tenant, as given; empty when none was."""
        return dict(split_api_key(pair.get_secret_value()) for pair in self.api_key)


class ServeSettings(GatewaySettings):
    """The gateway and a trainer cell on this host."""

    base_model: str = Field("smollm2-135m", min_length=1, description="smollm2-135m, tiny, a directory, or a hub id")
    ranks: int = Field(1, ge=1, description="processes of the cell; what tp and pp leave of them is data parallel")
    tp: int = Field(1, ge=1, description="tensor-parallel ranks: each holds a part of every layer")
    # Validated by default too: it is the last of the three that must fit together.
    pp: int = Field(1, ge=1, validate_default=True, description="pipeline stages: each holds some of the layers")
    slots: int = Field(64, ge=1, description="most models resident at once; an empty slot costs nothing")
    max_lora_rank: int = Field(128, ge=1, description="largest adapter rank a client may ask for")
    dtype: Literal["fp32", "bf16"] | None = Field(None, description="default: fp32 on CPU, bf16 on GPU")
    deterministic: bool | None = Field(
        None, description="results do not depend on who else is on the cell; default: on on CPU, off on GPU"
    )
    recompute: CliToggleFlag[bool] = Field(
        False, description="compute activations twice instead of keeping them: less memory, more work, same results"
    )
    no_load_optim: CliToggleFlag[bool] = Field(
        False, description="loads never restore the optimizer, whatever a request says"
    )
    no_save_optim: CliToggleFlag[bool] = Field(False, description="checkpoints hold the weights alone")
    save_buffers: int = Field(32, ge=1, description="most saves written at once; each has a copy of its model's state")
    save_memory_mb: int = Field(2048, ge=1, description="most memory of each rank for those copies, in MiB")
    cache: Directory = Field(default_factory=default_cache, description="directory of prepared base models")
    lora_adapter_path: str | None = Field(
        None, min_length=1, description="checkpoint to make a model of at the start: a directory or an address"
    )
    load: Directory | None = Field(
        None, description="Megatron checkpoint directory whose newest iteration has the base model's weights"
    )

    @property
    def is_without_load_optim(self) -> bool:
        """Asked for, or since `load` names a directory whose training has not saved an iteration."""
        return self.no_load_optim or (self.load is not None and not (self.load / TRACKER).exists())

    def shown(self) -> dict[str, object]:
        return {**super().shown(), "no_load_optim": self.is_without_load_optim}

    @field_validator("pp")
    @classmethod
    def _check_layout(cls, pp: int, info: ValidationInfo) -> int:
        ranks, tp = info.data.get("ranks", pp), info.data.get("tp", 1)
        if ranks % (tp * pp):
            raise ValueError(f"{ranks} ranks cannot be split into tp {tp} × pp {pp}")
        return pp


class GatewayProcessSettings(GatewaySettings):
    """The HTTP service alone; a cell started apart dials its socket."""

    base_model: str | None = Field(None, validate_default=True, description="what imports sit on, with --import-dir")
    cache: Directory = Field(default_factory=default_cache, description="directory of prepared base models")
    listen_fd: CliSuppress[int | None] = Field(None, description="a listening socket, inherited from the supervisor")
    start_up: CliSuppress[str | None] = Field(None, description="address of the checkpoint to make a first model of")

    @field_validator("base_model")
    @classmethod
    def _check_imports(cls, base_model: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("import_dir") and base_model is None:
            raise ValueError("is needed with --import-dir: imports are checked against it")
        return base_model
