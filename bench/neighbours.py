"""What others take for the same state, on the same disk: PyTorch's distributed checkpoint, `torch.save`, safetensors.

They sync part of what they write or nothing; the syncs they leave out are added, as a service needs them. What they
write is not digested, and a load verifies nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from bench.adapters import State, state_of
from bench.ground import Ground, empty, forget, raw_read, raw_write
from bench.ratios import Row, in_turns, timed
from trainer_cell.vault.shard_layout import image_memory

Tensors = dict[str, torch.Tensor]


def neighbour_rows(ground: Ground, sizes: list[int], pairs: dict[int, int]) -> Iterator[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    for megabytes in sizes:
        state = state_of(megabytes * 1_000_000)
        for name, (save, load) in _NEIGHBOURS.items():
            neighbour = _Neighbour(ground, state, save, load)
            count = max(3, pairs[megabytes] // 6)
            saving = in_turns(count, neighbour.save, neighbour.raw_write)
            yield Row(f"{name}: save and syncs / raw write", f"{megabytes} MB", saving)
            loading = in_turns(count, neighbour.load, neighbour.raw_read)
            yield Row(f"{name}: load into place / raw cold read", f"{megabytes} MB", loading)
            empty(ground.directory)


class _Neighbour:
    def __init__(
        self, ground: Ground, state: State, save: Callable[[Tensors, Path], None], load: Callable[[Tensors, Path], None]
    ) -> None:
        self._directory, self._target = ground.directory, ground.directory / "saved"
        self._image = state.image[: state.layout.size]
        self._memory = image_memory(state.layout.size)
        self._memory[:] = state.image
        self._live = {
            spec.key: torch.frombuffer(
                state.image,
                dtype=torch.float32,
                count=spec.num_bytes // 4,
                offset=state.layout.index[spec.key].pieces[0].begin,
            ).view(spec.shape)
            for spec in state.layout.specs
        }
        self._save, self._load = save, load

    def save(self) -> float:
        shutil.rmtree(self._target, ignore_errors=True)

        def act() -> None:
            self._target.mkdir()
            self._save(self._live, self._target)
            for path in (*self._target.iterdir(), self._target, self._directory):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        return timed(act)

    def load(self) -> float:
        forget(*self._target.iterdir())
        return timed(lambda: self._load(self._live, self._target))

    def raw_write(self) -> float:
        return raw_write(self._directory, self._image)

    def raw_read(self) -> float:
        return raw_read(list(self._target.iterdir()), self._memory)


def _copy(source: Tensors, target: Tensors) -> None:
    for key, tensor in target.items():
        tensor.copy_(source[key])


def _save_dcp(live: Tensors, directory: Path) -> None:
    dcp.save(live, checkpoint_id=directory, no_dist=True)


def _load_dcp(live: Tensors, directory: Path) -> None:
    dcp.load(live, checkpoint_id=directory, no_dist=True)


def _save_torch(live: Tensors, directory: Path) -> None:
    # A view would be saved with all of its storage.
    torch.save({key: tensor.clone() for key, tensor in live.items()}, directory / "state.pt")


def _load_torch(live: Tensors, directory: Path) -> None:
    _copy(torch.load(directory / "state.pt", weights_only=True), live)


def _save_safetensors(live: Tensors, directory: Path) -> None:
    safetensors.torch.save_file(live, directory / "state.safetensors")


def _load_safetensors(live: Tensors, directory: Path) -> None:
    _copy(safetensors.torch.load_file(directory / "state.safetensors"), live)


_NEIGHBOURS = {
    "torch.distributed.checkpoint": (_save_dcp, _load_dcp),
    "torch.save": (_save_torch, _load_torch),
    "safetensors": (_save_safetensors, _load_safetensors),
}
