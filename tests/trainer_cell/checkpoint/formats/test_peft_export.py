"""A checkpoint exported as a PEFT adapter: `peft` loads it whole, and computes what the trainer does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.service.state import read_state
from tests.trainer_cell.checkpoint.formats.states import (
    ADDRESS,
    EVERYTHING,
    LAYERS,
    import_job,
    published,
    random_state,
    stored_bytes,
)
from tests.trainer_cell.client import Client
from tests.trainer_cell.running_cell import running_cell
from tests.trainer_cell.training.arithmetic import Datum
from trainer_cell.checkpoint.formats.errors import TargetExists, UnknownFormat
from trainer_cell.checkpoint.formats.run import run_export
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.outcomes import ForwardBackwardDone
from trainer_cell.training.adapter_names import target_modules
from trainer_cell.vault.errors import CheckpointDamaged

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_export_comes_back_with_the_same_weights(tmp_path: Path, root: Path, tiny: Path, dtype: str) -> None:
    state = random_state(tiny, dtype=dtype)
    directory = published(root, tiny, state)
    run_export(ADDRESS.uri, root, "peft", tmp_path / "by-address")
    run_export(str(directory), root, "peft", tmp_path / "by-directory")
    tensors = load_file(tmp_path / "by-address" / "adapter_model.safetensors")
    assert tensors.keys() == state.parts["weight"].keys()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "by-address" / file).read_bytes() == (tmp_path / "by-directory" / file).read_bytes()
    import_job(tmp_path / "by-address", tmp_path / "other", tiny)
    assert read_state(tmp_path / "other", ADDRESS.uri).tensors == stored_bytes(state, ("weight",))


@pytest.mark.parametrize("rank", [1, pytest.param(8, marks=pytest.mark.full), pytest.param(32, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "flags", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_the_config_is_that_of_the_adapter(
    tmp_path: Path, root: Path, tiny: Path, rank: int, flags: tuple[bool, bool, bool]
) -> None:
    spec = AdapterSpec(rank, 32.0, *flags)
    published(root, tiny, random_state(tiny, spec))
    run_export(ADDRESS.uri, root, "peft", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (rank, 32)
    assert config["target_modules"] == list(target_modules(spec))
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "cellgate/tiny"
    names = sorted(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    assert len(names) == 2 * len({name.rpartition(".lora_")[0] for name in names})
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_an_export_overwrites_nothing_and_leaves_nothing_when_it_fails(tmp_path: Path, root: Path, tiny: Path) -> None:
    directory = published(root, tiny, random_state(tiny, LAYERS))
    for taken in ("directory", "file", "link"):
        target = tmp_path / taken
        {"directory": target.mkdir, "file": target.touch, "link": lambda t=target: t.symlink_to("nowhere")}[taken]()
        with pytest.raises(TargetExists):
            run_export(ADDRESS.uri, root, "peft", target)
    there = sorted(os.listdir(tmp_path))
    with pytest.raises(UnknownFormat):
        run_export("tinker://absent:train:0/weights/one", root, "peft", tmp_path / "adapter")
    shard = next(directory.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(content)
    with pytest.raises(CheckpointDamaged):
        run_export(ADDRESS.uri, root, "peft", tmp_path / "adapter")
    assert sorted(os.listdir(tmp_path)) == there


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = sys.modules["megatron"] = None
from pathlib import Path
from trainer_cell.checkpoint.formats.run import run_export
run_export(sys.argv[1], Path(sys.argv[2]), "peft", Path(sys.argv[3]))
"""


def test_an_export_needs_no_torch(tmp_path: Path, root: Path, tiny: Path) -> None:
    published(root, tiny, random_state(tiny, LAYERS))
    command = [sys.executable, "-c", WITHOUT_TORCH, ADDRESS.uri, str(root), str(tmp_path / "adapter")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")


# In a process of its own: transformers and a patched torch do not go together.
WITH_PEFT = """
import json, sys, warnings
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
def logprobs():
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).tolist()
without = logprobs()
warnings.simplefilter("error", UserWarning)  # of missing keys
model = PeftModel.from_pretrained(model, adapter)
result = model.load_adapter(adapter, "again")
again = logprobs()
model.save_pretrained(sys.argv[4], selected_adapters=["default"])
print(json.dumps([without, again, result.missing_keys, result.unexpected_keys]))
"""


def test_peft_loads_an_export_whole_and_computes_what_the_trainer_does(tmp_path: Path, root: Path, tiny: Path) -> None:
    state = random_state(tiny, EVERYTHING, dtype="fp32")
    small = {part: {name: 0.1 * t for name, t in tensors.items()} for part, tensors in state.parts.items()}
    directory = published(root, tiny, type(state)(state.spec, state.dtype, small, state.counters))
    run_export(ADDRESS.uri, root, "peft", tmp_path / "adapter")
    tokens = [3, 141, 59, 26, 5, 358, 97, 9, 323, 84]
    arguments = [str(tiny), str(tmp_path / "adapter"), json.dumps(tokens), str(tmp_path / "saved")]
    done = subprocess.run([sys.executable, "-c", WITH_PEFT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    without, theirs, missing, unexpected = json.loads(done.stdout.splitlines()[-1])
    assert (missing, unexpected) == ([], [])
    # What peft itself saves comes back in as it went out.
    import_job(tmp_path / "saved", tmp_path / "other", tiny)
    exported = read_state(root, ADDRESS.uri).part("weight")
    assert read_state(tmp_path / "other", ADDRESS.uri).tensors == exported
    with running_cell(tiny, root) as cell:
        model = Client(cell, ADDRESS.model_id, EVERYTHING)
        model.load(str(directory.relative_to(root)))
        datum = Datum(torch.tensor(tokens[:-1]), torch.tensor(tokens[1:]), torch.ones(len(tokens) - 1))
        done_here = cell.do(model.forward_backward([datum]), ForwardBackwardDone)
        assert cell.stop() == [0]
    ours = torch.frombuffer(bytearray(done_here.logprobs[0]), dtype=torch.float32)
    assert float((ours - torch.tensor(theirs)).abs().max()) < 1e-4
    assert float((ours - torch.tensor(without)).abs().max()) > 0.1, "the adapter must show"
