"""`python -m …reference_losses DIRECTORY`: what transformers and peft make of DIRECTORY/tiny under every loss, and of
cross_entropy in BF16.

DIRECTORY/losses.pt becomes a `Losses`, DIRECTORY/tiny.initial.pt the adapter it is of. Nothing of the cell is imported
here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.trainer_cell.training.arithmetic import ALL_PROJECTIONS, ALPHA, RANK, Tensors, batches, initial
from tests.trainer_cell.training.loss_formulas import CASES, Losses, Result, derivable, inputs_near, margin

LENGTHS = (17, 5, 33, 2, 9, 64, 21)
SPREAD = 0.05


def adapted(directory: Path, rounded: bool, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensors]:
    """The model and its adapter's parameters by name; `rounded`: all weights are what BF16 can hold."""
    network = AutoModelForCausalLM.from_pretrained(directory / "tiny", dtype=torch.float32, attn_implementation="sdpa")
    wrapped = get_peft_model(
        network,
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ALL_PROJECTIONS), lora_dropout=0.0),
        autocast_adapter_dtype=False,
    )
    parameters = {name.replace(".default", ""): p for name, p in wrapped.named_parameters() if p.requires_grad}
    began = initial({name: tuple(p.shape) for name, p in parameters.items()}, SPREAD)
    torch.save(began, directory / "tiny.initial.pt")
    for name, parameter in parameters.items():
        parameter.data.copy_(began[name])
    if rounded:
        for parameter in wrapped.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
    return wrapped, parameters


def logprobs_of(network: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = network(tokens[None]).logits[0].float()
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def result(network: torch.nn.Module, parameters: Tensors, losses: Losses, name: str) -> Result:
    """One sequence at a time; gradients are added up in FP32."""
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    logprobs, total = [], 0.0
    for tokens, inputs in zip(losses.tokens, losses.inputs, strict=True):
        said = logprobs_of(network, tokens, inputs["target_tokens"])
        loss = derivable(CASES[name], said, inputs)
        loss.backward()
        for key, parameter in parameters.items():
            gradients[key] += parameter.grad
            parameter.grad = None
        logprobs.append(said.detach())
        total += float(loss.detach())
    return Result(logprobs, total, gradients)


def record(directory: Path) -> None:
    network, parameters = adapted(directory, rounded=False, dtype=torch.float32)
    data = batches(network.config.vocab_size, 1, LENGTHS)[0]
    losses = Losses([datum.tokens for datum in data])
    generator = torch.Generator().manual_seed(6)
    for datum in data:
        with torch.no_grad():
            said = logprobs_of(network, datum.tokens, datum.targets)
        inputs = inputs_near(said, generator)
        assert all(margin(case, said, inputs) > 1e-4 for case in CASES.values())
        losses.inputs.append({"target_tokens": datum.targets, **inputs})
    losses.fp32 = {name: result(network, parameters, losses, name) for name in CASES}
    losses.exact = result(*adapted(directory, rounded=True, dtype=torch.float32), losses, "cross_entropy")
    losses.bf16 = result(*adapted(directory, rounded=True, dtype=torch.bfloat16), losses, "cross_entropy")
    torch.save(losses, directory / "losses.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(Path(sys.argv[1]))
