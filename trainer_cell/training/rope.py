"""What a `config.json` says of the rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Llama3Scaling:
    """Long waves are stretched by `factor`, short ones kept, with a ramp between; lengths in positions."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Rope:
    theta: float
    scaling: Llama3Scaling | None


def read_rope(config: Mapping[str, Any]) -> Rope:
    """From a `config.json` of either form: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Raises `ValueError` for a kind of scaling that is not computed here.
    """
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type {kind!r} is not computed; only default and llama3 are")
    for where in (parameters, config):
        if where.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is not computed")
    return Rope(_theta(config, parameters), _llama3(parameters) if kind == "llama3" else None)


def _theta(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> float:
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        return float(theta)
    if config.get("model_type") == "llama":
        return 10_000.0  # configs older than the field
    raise ValueError("config.json has no rope_theta")


def _llama3(parameters: Mapping[str, Any]) -> Llama3Scaling:
    try:
        return Llama3Scaling(
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_positions=int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ValueError(f"llama3 rope scaling without {error.args[0]}") from error
