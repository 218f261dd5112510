"""Logits are never there all at once, and long sequences fit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_cell.training.arithmetic import REPOSITORY
from trainer_cell.training.base_models import default_cache, prepare
from trainer_cell.training.build import Base
from trainer_cell.training.output_head import OutputHead

TOKENS = 2048
CHUNK = 64  # tokens
LIMIT_MIB = 8 * 1024


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The most elements of any tensor that is made inside."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                self.num_elements = max(self.num_elements, one.numel())
        return made


def passed_through(base: Base, at_once: int, kept: int) -> tuple[int, int]:
    """The largest tensor of a forward and backward pass through a head, and all that is kept in between, in elements;
    views of one storage count once."""
    assert base.head is not None
    head = OutputHead(base.head.weight, at_once, kept)
    head.projections = base.head.projections
    hidden = torch.randn(TOKENS, base.shape.hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = head.target_logprobs(hidden, torch.zeros(TOKENS, dtype=torch.int64))
        logprobs.sum().backward()
    return largest.num_elements, sum(storages.values())


def test_no_tensor_is_larger_than_a_chunk_of_logits(base: Base) -> None:
    vocab, inputs = base.shape.vocab, TOKENS * base.shape.hidden
    largest, kept = passed_through(base, at_once=CHUNK * vocab, kept=1 << 28)
    assert largest <= max(CHUNK * vocab, inputs)
    assert kept > TOKENS * vocab  # a row below the limit keeps its logits for the backward pass, in chunks
    largest, kept = passed_through(base, at_once=CHUNK * vocab, kept=CHUNK * vocab)
    assert largest <= max(CHUNK * vocab, inputs)
    assert kept < 2 * inputs + CHUNK * vocab


def test_without_chunks_all_logits_would_be_there(base: Base) -> None:
    largest, kept = passed_through(base, at_once=1 << 28, kept=1 << 28)
    assert largest == TOKENS * base.shape.vocab
    assert kept > TOKENS * base.shape.vocab


def most_memory_mib(num_tokens: int, *options: str) -> int:
    """Of a process that does one forward_backward over SmolLM2."""
    directory = str(prepare("smollm2-135m", default_cache()))
    program = [sys.executable, "-m", "tests.trainer_cell.training.programs.memory", directory, str(num_tokens)]
    done = subprocess.run([*program, *options], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.split()[-2])


@pytest.mark.full
@pytest.mark.cell
@pytest.mark.timeout(1800)
def test_smollm2_takes_8192_tokens_within_8_gib() -> None:
    assert most_memory_mib(8192, "recompute") < LIMIT_MIB
