from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.trainer_cell.training.arithmetic import REPOSITORY

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

# A process of its own: torch caches its list of factories the first time anyone asks.
_ON_META = """
import torch
from torch.utils import _device
from trainer_cell.training import cpu_device

cpu_device.install()
{afterwards}
with torch.device("meta"):
    print(torch.zeros(3).device)
"""


def device_of_a_tensor_made_on_meta(afterwards: str = "") -> str:
    program = [sys.executable, "-c", _ON_META.format(afterwards=afterwards)]
    return subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def test_models_can_still_be_made_on_the_meta_device() -> None:
    assert device_of_a_tensor_made_on_meta() == "meta"


def test_had_the_list_been_made_later_they_could_not() -> None:
    assert device_of_a_tensor_made_on_meta("_device._device_constructors.cache_clear()") == "cpu"


@pytest.mark.usefixtures("ranks")
def test_what_is_asked_of_cuda_lands_on_the_cpu() -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device="cpu").cuda().device.type == "cpu"
    with torch.cuda.Stream() as stream:
        stream.synchronize()
