"""The frozen base model of a cell: a Megatron GPTModel whose linear layers take adapters, filled from safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer_cell.protocol.outcomes import BaseModel, Layout
from trainer_cell.ranks import COLLECTIVE_TIMEOUT
from trainer_cell.training import cpu_device
from trainer_cell.training.attention import PackedAttention
from trainer_cell.training.base_models import describe
from trainer_cell.training.base_weights import load_weights
from trainer_cell.training.frequencies import inverse_frequencies
from trainer_cell.training.model_shape import ModelShape, check_layout, read_shape
from trainer_cell.training.output_head import OutputHead
from trainer_cell.training.projections import Adapted, AdaptedColumn, AdaptedRow, adapted_of
from trainer_cell.training.recompute import RecomputedLayer, get_ready_to_recompute


@dataclass(frozen=True)
class Base:
    """One rank's part of the frozen base model.

    adapted: the layers that take adapters, in the order of the model; on the last pipeline stage the head is the last.
    features: (out, in) of every projection of the whole model, other stages' too, by name in the order of the model.
    """

    model: Any
    shape: ModelShape
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    description: BaseModel
    adapted: tuple[Adapted, ...]
    features: Mapping[str, tuple[int, int]]

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def head(self) -> OutputHead | None:
        """None on every pipeline stage but the last."""
        return self.model.output_layer if self.model.post_process else None


def start_parallel(layout: Layout, deterministic: bool = True) -> None:
    """Make Megatron's process groups; every rank calls it once, after `torch.distributed` is initialised."""
    assert dist.get_world_size() == layout.world
    cpu_device.install()
    minutes = int(COLLECTIVE_TIMEOUT.total_seconds() // 60)
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, distributed_timeout_minutes=minutes)
    model_parallel_cuda_manual_seed(1)
    _choose_algorithms(deterministic)
    # Else every torch.empty is filled with NaN, which finds bugs and costs a pass over the memory.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _choose_algorithms(deterministic: bool) -> None:
    if torch.cuda.is_available():
        if deterministic:
            # What cuBLAS needs for equal results over several streams; read when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    else:
        # The same, but for the compiler, which the other would import.
        torch.set_deterministic_debug_mode("warn" if deterministic else "default")


def build_base(
    directory: Path, layout: Layout, device: torch.device, dtype: torch.dtype, recompute: bool = False
) -> Base:
    """Read a prepared directory; every rank calls it together, after `start_parallel`.

    recompute: layers keep only their input for the backward pass, and compute the rest again.

    Raises `UnsupportedBase` (a `ValueError`) for a model or layout that is not computed here, `DamagedBase` for files
    that are not what they should be.
    """
    shape = read_shape(directory)
    check_layout(shape, layout.tensor, layout.pipeline)
    description = _described_by_first(directory, shape)
    model = _empty_model(shape, layout, device, dtype, recompute)
    load_weights(model, directory, shape, layout, parallel_state.get_tensor_model_parallel_rank())
    model.to(device)
    model.rotary_pos_emb.inv_freq = inverse_frequencies(shape.rope, shape.head_dim).to(device)
    adapted = tuple(_adapted(model))
    return Base(model, shape, layout, device, dtype, description, adapted, _features_of_all_stages(adapted))


def _adapted(model: Any) -> Iterator[Adapted]:
    for layer in model.decoder.layers:
        yield from adapted_of(layer)
    if model.post_process:
        yield model.output_layer


def _features_of_all_stages(adapted: tuple[Adapted, ...]) -> dict[str, tuple[int, int]]:
    mine = {p.name: (p.out_features, p.in_features) for layer in adapted for p in layer.projections}
    # Stages follow one another in the order of the ranks.
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return {name: features for of_rank in of_ranks for name, features in of_rank.items()}


def _described_by_first(directory: Path, shape: ModelShape) -> BaseModel:
    """Digesting reads every byte, so rank 0 does it for all."""
    said: list[Any] = [describe(directory, shape.vocab, shape.max_positions) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    description: BaseModel = said[0]
    return description


def _empty_model(shape: ModelShape, layout: Layout, device: torch.device, dtype: torch.dtype, recompute: bool) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    if recompute:
        get_ready_to_recompute()
        spec.module = RecomputedLayer
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp
    # A module spec in megatron-core 0.16, a functools.partial since 0.19.
    mlp = mlp.keywords["submodules"] if hasattr(mlp, "keywords") else mlp.submodules
    attention.core_attention = PackedAttention
    attention.linear_qkv, attention.linear_proj = AdaptedColumn, AdaptedRow
    mlp.linear_fc1, mlp.linear_fc2 = AdaptedColumn, AdaptedRow
    return GPTModel(
        config=_transformer_config(shape, layout, device, dtype),
        transformer_layer_spec=spec,
        vocab_size=-(-shape.vocab // layout.tensor) * layout.tensor,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
    )


def _transformer_config(shape: ModelShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> Any:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.mlp_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # Packed rows of any length between pipeline stages; the dispatcher is a condition of it even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Else the loss is divided by the number of microbatches.
        calculate_per_token_loss=True,
        # These need kernels of apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        cuda_graph_scope=[],
    )
