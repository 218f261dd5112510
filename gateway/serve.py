"""`cellgate serve`: turns settings into what the supervisor runs."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import sys

from gateway.child_process import log
from gateway.keys import keys_in_force
from gateway.listener import open_listener, port_of, probe_url_of, url_of
from gateway.settings import ServeSettings
from gateway.start_up import StartUp, StartUpRefused, read_start_up
from gateway.state_directory import StateDirectory, StateUnusable
from gateway.supervisor import Plan, Supervisor
from trainer_cell.vault.errors import VaultError


def serve(settings: ServeSettings) -> int:
    """Run until stopped; the process's exit status."""
    if importlib.util.find_spec("torch") is None:
        log("cellgate: the trainer cell needs torch: install cellgate[cell], or run `cellgate gateway` alone")
        return 1
    state = StateDirectory(settings.state)
    try:
        state.create()
        state.lock()
        keys = keys_in_force(settings, state)
        start_up = read_start_up(settings, state, keys)
        listener = open_listener(settings.host, settings.port)
    except (StateUnusable, StartUpRefused, VaultError, OSError) as error:
        log(f"cellgate: {error}")
        return 1
    with listener:
        log_settings(settings, listener)
        for line in start_up.notes:
            log(f"cellgate: {line}")
        return asyncio.run(_supervise(plan_of(settings, state, keys, listener, start_up), state))


async def _supervise(plan: Plan, state: StateDirectory) -> int:
    return await Supervisor(plan, state).run()


def plan_of(
    settings: ServeSettings, state: StateDirectory, keys: dict[str, str], listener: socket.socket, start_up: StartUp
) -> Plan:
    gateway_socket = settings.gateway_socket or state.socket_path()
    python = sys.executable
    # Without this `-m` would look for our packages in the current directory first.
    environment = {name: value for name, value in os.environ.items() if not _is_ours(name)} | {"PYTHONSAFEPATH": "1"}
    layout = ["--tp", str(settings.tp), "--pp", str(settings.pp)]
    pairs = ",".join(f"{key}={tenant}" for key, tenant in keys.items())

    def cell(base_model: str) -> list[str]:
        options = ["--base-model", base_model, "--gateway-socket", str(gateway_socket)]
        options += ["--checkpoints", str(settings.checkpoint_root), "--cache", str(settings.cache)]
        options += ["--slots", str(settings.slots), "--max-lora-rank", str(settings.max_lora_rank)]
        options += ["--save-buffers", str(settings.save_buffers), "--save-memory-mb", str(settings.save_memory_mb)]
        options += layout
        if settings.dtype is not None:
            options += ["--dtype", settings.dtype]
        if settings.deterministic is not None:
            options.append("--deterministic" if settings.deterministic else "--no-deterministic")
        options += ["--recompute"] * settings.recompute
        options += ["--no-load-optim"] * start_up.no_load_optim + ["--no-save-optim"] * settings.no_save_optim
        # The loopback address twice: a host name need not resolve. A cell is never restarted by its agent: a new one
        # is a new epoch, and that is this supervisor's to start.
        torchrun = [python, "-m", "trainer_cell.agent", "--nnodes", "1", "--nproc-per-node", str(settings.ranks)]
        torchrun += ["--max-restarts", "0", "--local-addr", "127.0.0.1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        return [*torchrun, "-m", "trainer_cell", *options]

    gateway = [python, "-m", "gateway", "--state", str(settings.state), "--checkpoints", str(settings.checkpoint_root)]
    gateway += ["--gateway-socket", str(gateway_socket), "--host", settings.host, "--port", str(port_of(listener))]
    gateway += ["--max-body-mb", str(settings.max_body_mb), "--stop-grace-s", str(settings.stop_grace_s / 2)]
    gateway += ["--replaced-grace-s", str(settings.replaced_grace_s), "--sweep-interval-s"]
    gateway += [str(settings.sweep_interval_s), "--listen-fd", str(listener.fileno())]
    for name in ("snapshot_steps", "snapshot_s", "idle_model_days", "keep_last", "keep_every", "tenant_quota_gb"):
        if (value := getattr(settings, name)) is not None:
            gateway += [f"--{name.replace('_', '-')}", str(value)]
    if settings.import_dir:
        gateway += ["--base-model", settings.base_model, "--cache", str(settings.cache)]
        gateway += [option for directory in settings.import_dir for option in ("--import-dir", str(directory))]
    return Plan(
        gateway=gateway,
        prepare=[
            *(python, "-m", "trainer_cell.training.prepare_base", settings.base_model),
            *("--cache", str(settings.cache), *layout),
            *(("--weights", str(start_up.weights)) if start_up.weights else ()),
        ],
        cell=cell,
        listener=listener.fileno(),
        url=url_of(settings.host, listener),
        probe_url=probe_url_of(settings.host, listener),
        # Keys travel in the environment, which only this user can read; a command line is open to everyone.
        gateway_environment={**environment, "CELLGATE_API_KEY": pairs},
        cell_environment=environment,
        stop_grace_s=settings.stop_grace_s,
        start_up=("--start-up", start_up.checkpoint.uri) if start_up.checkpoint else (),
    )


def _is_ours(name: str) -> bool:
    """Whether an environment variable is an option of this process, told to the children on their command lines."""
    return name.startswith("CELLGATE_") and name.removeprefix("CELLGATE_").lower() in ServeSettings.model_fields


def log_settings(settings: ServeSettings, listener: socket.socket) -> None:
    """What is in force, at the start: a misspelt environment variable shows here and nowhere else."""
    shown = {**settings.shown(), "port": port_of(listener)}
    log("cellgate: " + " ".join(f"{name}={value}" for name, value in shown.items() if value is not None))
