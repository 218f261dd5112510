"""The optimizer of one slot: FP32 masters, Adam's moments and the gradients accumulated since the last step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.optim.adamw import adamw

from trainer_cell.protocol.commands import AdamParams
from trainer_cell.training.adapter import Adapter
from trainer_cell.training.lr_schedule import LrScheduler

# Adam squares gradients in FP32: beyond this the square is infinite, and one such step would stay in the moments.
_LARGEST_NORM = 1e18


class SlotOptimizer:
    """AdamW over one adapter. All buffers are flat, float32, and laid out as the adapter's own.

    master: in FP32 the adapter's own storage, else what its weights are rounded from.
    step: Adam's count of steps since the moments were fresh; iteration: steps in the model's life.
    scheduler: the model's own learning rates; it counts every step that is applied.
    """

    def __init__(self, adapter: Adapter, scheduler: LrScheduler | None = None) -> None:
        self.adapter = adapter
        flat = adapter.flat
        self.master = flat if flat.dtype == torch.float32 else flat.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.step = 0
        self.iteration = 0
        self.last_params: AdamParams | None = None
        self.scheduler = scheduler
        self._gradient: torch.Tensor | None = None

    @property
    def has_gradients(self) -> bool:
        return self._gradient is not None

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's sum since the last step; data-parallel ranks are summed only by the step."""
        return self._gradient

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add one command's gradient, which the optimizer may keep."""
        if self._gradient is None:
            self._gradient = gradient
        else:
            self._gradient.add_(gradient)

    def clear_gradients(self) -> None:
        self._gradient = None

    def fresh_moments(self) -> None:
        """As a new optimizer has them; the iteration is the model's and stays."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.step = 0

    def masters_from_weights(self) -> None:
        if self.master is not self.adapter.flat:
            self.master.copy_(self.adapter.flat)

    def weights_from_masters(self) -> None:
        if self.master is not self.adapter.flat:
            with torch.no_grad():
                self.adapter.flat.copy_(self.master)

    def apply(self, params: AdamParams) -> dict[str, float]:
        """One step over the accumulated gradients, which are cleared; the metrics are the same on every rank.

        Non-finite gradients are dropped and nothing else changes: `skipped_non_finite` is 1 then.
        """
        gradient = self._gradient
        assert gradient is not None
        with torch.no_grad():
            self._sum_over_ranks(gradient)
            norm = self._global_norm(gradient)
            clip = _clip_factor(norm, params.grad_clip_norm)
            self._gradient = None
            if not norm * clip < _LARGEST_NORM:  # also when it is NaN
                return {"step": float(self.step), "skipped_non_finite": 1.0}
            if clip < 1.0:
                gradient.mul_(clip)
            self._adam_step(gradient, params)
        return {"grad_norm": norm, "step": float(self.step), "learning_rate": params.learning_rate}

    def _sum_over_ranks(self, gradient: torch.Tensor) -> None:
        """Over the data-parallel ranks; what tensor-parallel ranks hold alike gets the same bits on each of them."""
        layout = self.adapter.base.layout
        if gradient.numel() == 0:
            return  # a pipeline stage of which nothing is trained; its peers return too
        if layout.data > 1:
            dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
        whole = gradient[self.adapter.num_sharded :]
        if layout.tensor > 1 and layout.data > 1 and whole.numel():
            # Each sum went its own way through the network and may be rounded in another order. Copies of a weight that
            # drift apart would show after the next load, which gives every rank the same one.
            source = parallel_state.get_tensor_model_parallel_src_rank()
            dist.broadcast(whole, source, group=parallel_state.get_tensor_model_parallel_group())

    def _adam_step(self, gradient: torch.Tensor, params: AdamParams) -> None:
        adamw(
            [self.master.detach()],
            [gradient],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [torch.tensor(self.step, dtype=torch.int64)],
            foreach=False,
            fused=False,
            amsgrad=False,
            maximize=False,
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self.weights_from_masters()
        self.step += 1
        self.iteration += 1
        self.last_params = params
        if self.scheduler is not None:
            self.scheduler.advance()

    def _global_norm(self, gradient: torch.Tensor) -> float:
        """2-norm over the whole adapter, summed in float64: cut tensors add up over tensor-parallel ranks, whole ones
        count once, and pipeline stages add up."""
        layout = self.adapter.base.layout
        sharded, whole = gradient[: self.adapter.num_sharded], gradient[self.adapter.num_sharded :]
        squared = _squared_norm(sharded) + _squared_norm(whole) / layout.tensor
        if layout.tensor * layout.pipeline > 1:
            dist.all_reduce(squared, group=parallel_state.get_model_parallel_group())
        return math.sqrt(value) if (value := float(squared)) >= 0 else math.nan


def _squared_norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def _clip_factor(norm: float, max_norm: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` scales gradients by; 1 without a limit."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
