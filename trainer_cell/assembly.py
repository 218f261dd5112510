"""Builds a cell from its settings and runs it: the only place that knows all its parts."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from trainer_cell.checkpoint.capture import SaveBuffers
from trainer_cell.checkpoint.load import LoadContext
from trainer_cell.checkpoint.manifest_of import SaveFacts, library_versions
from trainer_cell.checkpoint.plan import PlanCache
from trainer_cell.checkpoint.publication import PublishContext
from trainer_cell.checkpoint.publisher import Publisher, end_process_on_bugs
from trainer_cell.checkpoint.save import SaveContext
from trainer_cell.checkpoint.vote import BallotBox
from trainer_cell.gateway_link import GatewayLink
from trainer_cell.loop import Cell, serve
from trainer_cell.protocol.commands import PROTOCOL_VERSION
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, Layout
from trainer_cell.ranks import COLLECTIVE_TIMEOUT, Ranks
from trainer_cell.settings import CellSettings
from trainer_cell.training.base_models import BaseUnavailable, default_cache, prepare
from trainer_cell.training.build import build_base, start_parallel
from trainer_cell.training.model_shape import UnsupportedBase, check_layout, read_shape
from trainer_cell.training.safetensors_files import DamagedBase
from trainer_cell.training.slots import SlotTable
from trainer_cell.vault.layout import Vault, new_ulid

log = logging.getLogger(__name__)

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Choices:
    """Settings whose defaults depend on the machine."""

    device: torch.device
    dtype: Literal["fp32", "bf16"]
    deterministic: bool


class CannotStart(Exception):
    """No cell can be built of these settings; the message is one line for the operator."""


def run_cell(settings: CellSettings) -> None:
    """Build this rank's part of the cell and serve until told to stop.

    Raises `CannotStart`, on rank 0; the other ranks exit without a word then.
    """
    layout = _layout(settings)
    choices = _choose(settings)
    end_process_on_bugs()
    dist.init_process_group("gloo" if choices.device.type == "cpu" else "nccl", timeout=COLLECTIVE_TIMEOUT)
    ranks = Ranks()
    cell, epoch = _build(settings, layout, choices, ranks)
    if not ranks.is_first:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it leaves when rank 0 tells it to
        serve(cell, None)
    else:
        link = GatewayLink(settings.gateway_socket, lambda: _hello(settings, choices, cell, epoch))
        link.stop_on_signal(signal.SIGTERM)
        with cell.saving.publishing.vault.hold_epoch(epoch):
            log.info("cell epoch %s serves %s on %s", epoch, cell.base.description.name, layout)
            serve(cell, link)
        link.close()
    dist.destroy_process_group()


def _choose(settings: CellSettings) -> _Choices:
    has_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if has_gpu:
        torch.cuda.set_device(local_rank)
    else:
        local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // local_world))
    return _Choices(
        device=torch.device("cuda", local_rank) if has_gpu else torch.device("cpu"),
        dtype=settings.dtype or ("bf16" if has_gpu else "fp32"),
        deterministic=not has_gpu if settings.deterministic is None else settings.deterministic,
    )


def _layout(settings: CellSettings) -> Layout:
    world, data = int(os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]) // (settings.tp * settings.pp)
    if data * settings.tp * settings.pp != world:
        _refuse(f"{world} ranks cannot be split into tp {settings.tp} × pp {settings.pp}")
    return Layout(world=world, tensor=settings.tp, pipeline=settings.pp, data=data)


def _refuse(reason: str) -> NoReturn:
    if os.environ["RANK"] != "0":
        sys.exit(1)
    raise CannotStart(reason)


def _prepared(settings: CellSettings, layout: Layout) -> str:
    """The base model's directory, if it can be served in this layout."""
    try:
        directory = prepare(settings.base_model, settings.cache or default_cache())
        check_layout(read_shape(directory), layout.tensor, layout.pipeline)
    except (BaseUnavailable, DamagedBase, UnsupportedBase) as problem:
        raise CommandFailed(ErrorKind.BAD_COMMAND, str(problem)) from problem
    return str(directory)


def _build(settings: CellSettings, layout: Layout, choices: _Choices, ranks: Ranks) -> tuple[Cell, str]:
    try:
        directory = Path(ranks.first(lambda: _prepared(settings, layout)))
    except CommandFailed as failure:
        _refuse(failure.message)
    start_parallel(layout, choices.deterministic)
    base = build_base(directory, layout, choices.device, _TORCH_DTYPES[choices.dtype], settings.recompute)
    epoch = ranks.first(new_ulid)
    vault = Vault(settings.checkpoints)
    facts = SaveFacts(epoch, base.description, layout, choices.dtype, library_versions())
    cell = Cell(
        ranks=ranks,
        base=base,
        slots=SlotTable(base, settings.slots, settings.max_lora_rank),
        saving=SaveContext(
            publishing=PublishContext(
                ranks=ranks,
                vault=vault,
                ballots=BallotBox(ranks),
                buffers=SaveBuffers(
                    settings.save_buffers, settings.save_memory_mb << 20, choices.device.type == "cuda"
                ),
                facts=facts,
            ),
            plans=PlanCache(ranks, choices.dtype),
            publisher=Publisher(),
            no_save_optim=settings.no_save_optim,
        ),
        loading=LoadContext(ranks, vault, base.description, choices.dtype, settings.no_load_optim),
    )
    return cell, epoch


def _hello(settings: CellSettings, choices: _Choices, cell: Cell, epoch: str) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        epoch=epoch,
        layout=cell.saving.publishing.facts.layout,
        base_model=cell.base.description,
        dtype=choices.dtype,
        deterministic=choices.deterministic,
        no_load_optim=settings.no_load_optim,
        no_save_optim=settings.no_save_optim,
        slots=settings.slots,
        max_lora_rank=settings.max_lora_rank,
        models=cell.resident(),
    )
