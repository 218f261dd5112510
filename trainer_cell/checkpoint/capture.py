"""A copy of a slot's pieces in buffers that are kept from save to save: what follows in training does not reach it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_cell.checkpoint.plan import Piece
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.training.slots import SlotState
from trainer_cell.vault.shard_file import TensorPiece

_ALIGNMENT = 64
_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class CaptureBuffer:
    """One flat CPU buffer, grown when a capture needs more: fresh pages would cost several times the copy."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def capture(self, pieces: Sequence[Piece], state: SlotState) -> list[TensorPiece]:
        """Copy the live tensors; the result's memory is valid until the next capture.

        state: this rank's live tensors, of the pieces' local shapes. Raises `CommandFailed` (NON_FINITE_STATE) for
        NaN and infinity: a checkpoint that no load accepts must not take the place of one that works.
        """
        offsets, end = [], 0
        for piece in pieces:
            offsets.append(end)
            end += -(-piece.num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._bytes.numel() < end:
            self._bytes = torch.empty(end, dtype=torch.uint8, pin_memory=self._pin)
        captured = [
            self._copy(piece, getattr(state, piece.part)[piece.name], offset)
            for piece, offset in zip(pieces, offsets, strict=True)
        ]
        if self._pin:
            torch.cuda.synchronize()
        for piece, offset in zip(pieces, offsets, strict=True):
            if not bool(torch.isfinite(self._view(piece, offset)).all()):
                raise CommandFailed(
                    ErrorKind.NON_FINITE_STATE, f"{piece.key} of the model holds NaN or infinite values"
                )
        return captured

    def _view(self, piece: Piece, offset: int) -> torch.Tensor:
        part = self._bytes[offset : offset + piece.num_bytes]
        return part.view(_TORCH_DTYPES[piece.dtype]).view(piece.sharding.local_shape)

    def _copy(self, piece: Piece, live: torch.Tensor, offset: int) -> TensorPiece:
        self._view(piece, offset).copy_(live.detach(), non_blocking=self._pin)
        return TensorPiece(
            key=piece.key,
            dtype=piece.dtype,
            shape=piece.sharding.local_shape,
            global_shape=piece.sharding.global_shape,
            axis=piece.sharding.axis,
            offset=piece.sharding.offset,
            data=memoryview(self._bytes[offset : offset + piece.num_bytes].numpy()),
        )
