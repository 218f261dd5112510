"""The output layer: log-probabilities of target tokens, a chunk of logits at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from trainer_cell.training.projections import Adapted, Routing

# In elements: 256 MiB in FP32 for the logits of one chunk, 1 GiB for what a row keeps until its backward pass. A row
# that would keep more computes its logits a second time instead, at a tenth more work.
LOGITS_AT_ONCE = 1 << 26
LOGITS_KEPT = 1 << 28


class OutputHead(Adapted, torch.nn.Module):  # type: ignore[misc]
    """Takes the place of the model's output layer and gives the hidden states through; losses call it for the rest.

    weight: [this rank's vocabulary rows, hidden]; rows beyond the true vocabulary are there so that all ranks have
    equally many, and take part in nothing.
    """

    def __init__(self, weight: torch.nn.Parameter, at_once: int = LOGITS_AT_ONCE, kept: int = LOGITS_KEPT) -> None:
        super().__init__()
        self.weight = weight
        self._tokens_at_once = max(1, at_once // weight.size(0))
        self._tokens_kept = kept // weight.size(0)

    def forward(self, hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden, None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, this rank's vocabulary rows]; -inf beyond the true vocabulary."""
        (projection,) = self.projections
        out = linear(copy_to_tensor_model_parallel_region(hidden), self.weight)
        surplus = out.size(-1) - projection.size
        out = out[..., : projection.size] if surplus else out
        out = out + self.column_product(hidden) if self.is_adapted() else out
        return pad(out, (0, surplus), value=float("-inf")) if surplus else out

    def target_logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], int64 [tokens] -> float32 [tokens]."""
        chunks = zip(hidden.split(self._tokens_at_once), targets.split(self._tokens_at_once), strict=True)
        if torch.is_grad_enabled() and hidden.size(0) > self._tokens_kept:
            again = partial(checkpoint, self._chunk_logprobs, self.routing, use_reentrant=False)
            return torch.cat([again(*chunk) for chunk in chunks])
        return torch.cat([self._chunk_logprobs(self.routing, *chunk) for chunk in chunks])

    def _chunk_logprobs(self, routing: Routing, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The adapter is an argument: by the time this is computed again another may be active."""
        with self.routed(routing):
            # The cross entropy overwrites its argument, which nothing else reads.
            return -vocab_parallel_cross_entropy(self.logits(hidden).float(), targets)
