"""Training states of given sizes: the tensors of an adapter over a Llama of 30 layers, in FP32, with their moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_cell.protocol.commands import AdamParams, AdapterSpec
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import FileRecord, Manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import PieceSpec, ShardLayout, image_memory, lay_out, write_image
from trainer_cell.vault.tensor_index import TensorIndex, index_of
from trainer_cell.vault.verify import Wanted

SHARD = "rank00000.safetensors"
EPOCH = "BENCH"
_LAYERS = 30
# Inputs and outputs of SmolLM2-135M's projections.
_FEATURES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
_PARTS = ("weight", "exp_avg", "exp_avg_sq")
BYTES_PER_RANK = 4 * len(_PARTS) * _LAYERS * sum(map(sum, _FEATURES.values()))


@dataclass(frozen=True)
class State:
    """An adapter's state as one rank holds it for saving; `image` is its file."""

    layout: ShardLayout
    index: TensorIndex
    image: memoryview

    @property
    def wanted(self) -> dict[str, Wanted]:
        return {spec.key: Wanted(None, 0, spec.shape, spec.shape, spec.dtype) for spec in self.layout.specs}


def state_of(num_bytes: int) -> State:
    """About so many bytes, none of them zero."""
    layout = lay_out(SHARD, _specs(max(1, round(num_bytes / BYTES_PER_RANK))))
    image = image_memory(layout.image_bytes)
    # The float 0.75, again and again.
    image[:] = (b"\x00\x00\x40\x3f" * (image.nbytes // 4))[: image.nbytes]
    image[: len(layout.header)] = layout.header
    return State(layout, index_of([layout]), image)


def _specs(rank: int) -> Sequence[PieceSpec]:
    specs = []
    for part in _PARTS:
        for layer in range(_LAYERS):
            for projection, (inputs, outputs) in _FEATURES.items():
                name = f"base_model.model.model.layers.{layer}.{projection}"
                for tensor, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                    specs.append(PieceSpec(f"{name}.{tensor}.weight/{part}", "F32", shape, shape, None, 0))
    return specs


def publish(vault: Vault, state: State, model_id: str) -> Path:
    """All of a save but its capture and votes; the version's directory."""
    address = CheckpointAddress(model_id, "weights", "bench")
    staging = begin(vault, address, True, state.layout.size, EPOCH)
    record = write_image(staging, state.layout, state.image)
    version = finish(vault, staging, _manifest(state, record, address), True, state.index)
    return vault.version_dir(version)


def _manifest(state: State, record: FileRecord, address: CheckpointAddress) -> Manifest:
    return Manifest(
        command_id="bench",
        model_id=address.model_id,
        kind=address.kind,
        name=address.name,
        tenant_digest="bench",
        base_model="bench",
        base_digest="bench",
        adapter=AdapterSpec(1, 32.0, train_attn=True, train_mlp=True, train_unembed=False),
        targets=("q_proj",),
        iteration=1,
        step=1,
        has_optimizer=True,
        has_scheduler=False,
        adam_params=AdamParams(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0),
        layout=Layout(world=1, tensor=1, pipeline=1, data=1),
        dtype="fp32",
        created="2026-01-01T00:00:00Z",
        expires=None,
        user_metadata={},
        libraries={},
        non_finite=False,
        tensors=state.index.tensors,
        files={state.layout.file: record},
    )
