"""Keeps torch's compiler out of a process without a GPU."""

from __future__ import annotations

from typing import Any

import torch


def switch_off_without_gpu() -> None:
    """Before megatron-core is imported, which asks for the compiler then: a third of what a rank would import.

    megatron-core compiles small functions at their first call, again for new lengths: seconds in the middle of a
    command, a C++ compiler needed on the machine, and other bits where compiled and plain code take turns.
    """
    if not torch.cuda.is_available():
        torch.compile = _plain


def _plain(model: Any = None, **_options: Any) -> Any:
    return model if model is not None else lambda function: function
