"""Lets megatron-core run where there is no GPU: what it asks of CUDA is answered by the CPU.

Only what megatron-core calls without asking is redirected; tensors land on the CPU and streams do nothing.
Programs that also use transformers must import it, and load a model with it, before `install`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

_CPU = torch.device("cpu")
_installed = False


def install() -> bool:
    """Redirect CUDA requests to the CPU; returns False, having done nothing, when a GPU is there."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        # torch caches the set of its factory functions for `with torch.device(...)`. Filled after the wrapping below,
        # it would hold the wrappers, and meta-device construction would leave buffers uninitialised without a word.
        _device._device_constructors()
        _redirect_device()
        _redirect_random_state()
        _redirect_megatron_random_state()
        _installed = True
    return True


def _redirect_device() -> None:
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = lambda device=None: _NoStream()
    torch.cuda.default_stream = lambda device=None: _NoStream()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _redirect_random_state() -> None:
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    # Not torch.manual_seed, which calls back into torch.cuda.
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _redirect_megatron_random_state() -> None:
    # These two reach below torch.cuda, so they are replaced where they are defined.
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


class _NoStream:
    """A stream or event of a device that runs everything in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None
