"""Megatron's names of adapter tensors, read by their components, and what they are in PEFT's.

    [module.]…decoder.layers[.<n>].<module>.<marker>[.adapter_<projection>].<linear_in|linear_out>[.weight]
    [module.]…output_layer.<marker>.<linear_in|linear_out>[.weight]

marker: `adapter`, or `adapters.<slot>`, which becomes `adapter`. `linear_in` is A, `linear_out` is B. Without
`adapter_<projection>` the pair of `linear_qkv` and `linear_fc1` acts on all their projections at once: one A for all,
and the rows of B in Megatron's order (`checkpoint.formats.fused`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainer_cell.checkpoint.formats.errors import Incompatible
from trainer_cell.training.adapter_names import kind_of, pair_names

_MODULES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("self_attention", "linear_qkv"): ("q", "k", "v"),
    ("self_attention", "linear_proj"): ("o",),
    ("mlp", "linear_fc1"): ("gate", "up"),
    ("mlp", "linear_fc2"): ("down",),
    ("output_layer",): ("lm_head",),
}
_HALVES = {"linear_in": "A", "linear_out": "B"}
_PARENTS = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}


@dataclass(frozen=True)
class Place:
    """Where an adapter tensor sits. layer: as the name counts, which is from the stage's first; None for the output
    layer, or when the layers are the tensor's own first dimension (`is_stacked`). short: `q`, `k`, … `lm_head` of the
    projections the tensor is for, in Megatron's order. half: `A` or `B`."""

    layer: int | None
    module: str
    short: tuple[str, ...]
    half: str
    is_stacked: bool = False

    @property
    def is_fused(self) -> bool:
        return len(self.short) > 1

    def projections(self, layer: int | None) -> tuple[str, ...]:
        """Module paths in Hugging Face's words, for the model's layer of that number."""
        return tuple(projection_path(short, layer) for short in self.short)


def projection_path(short: str, layer: int | None) -> str:
    if short == "lm_head":
        return short
    return f"model.layers.{layer}.{_PARENTS.get(short, 'mlp')}.{short}_proj"


def tensor_name(projection: str, half: str) -> str:
    """PEFT's name of one of a projection's two tensors."""
    a, b = pair_names(projection)
    return a if half == "A" else b


def slot_free(name: str) -> tuple[str, ...]:
    """The components, with the one `adapters.<slot>` or `adapter` among them as `adapter`.

    Raises `Incompatible` unless exactly one component is one.
    """
    components, found, free = name.split("."), 0, []
    at = 0
    while at < len(components):
        is_slot = components[at] == "adapters" and at + 1 < len(components) and components[at + 1].isdecimal()
        if is_slot or components[at] == "adapter":
            found += 1
            free.append("adapter")
            at += 2 if is_slot else 1
        else:
            free.append(components[at])
            at += 1
    if found != 1 or "adapters" in free:
        raise Incompatible(f"{name}: not exactly one component of the name is `adapters.<slot>` or `adapter`")
    return tuple(free)


def parse(name: str) -> Place:
    """Raises `Incompatible` for what is no adapter tensor's name."""
    free = slot_free(name)
    marker = free.index("adapter")
    module, tail = free[:marker], list(free[marker + 1 :])
    while module and module[0] == "module":
        module = module[1:]
    layer, is_stacked = None, False
    if module[:2] == ("decoder", "layers"):
        module = module[2:]
        is_stacked = not (module and module[0].isdecimal())
        if not is_stacked:
            layer, module = int(module[0]), module[1:]
    of_layer = layer is not None or is_stacked
    short = _MODULES.get(module)
    if short is None or of_layer == (module == ("output_layer",)):
        raise Incompatible(f"{name}: {'.'.join(module)} is no layer that takes an adapter here")
    if tail[-1:] == ["weight"]:
        tail.pop()
    if len(tail) == 2 and tail[0].removeprefix("adapter_") in short and tail[0].startswith("adapter_"):
        short = (tail.pop(0).removeprefix("adapter_"),)
    if len(tail) != 1 or tail[0] not in _HALVES:
        raise Incompatible(f"{name}: the name does not end in linear_in or linear_out")
    return Place(layer, module[-1], short, _HALVES[tail[0]], is_stacked)


def parse_all(names: Iterable[str]) -> dict[str, Place]:
    """By name; raises `Incompatible` also when two names come to the same place."""
    places: dict[str, Place] = {}
    by_place: dict[Place, str] = {}
    for name in names:
        place = parse(name)
        if place in by_place:
            raise Incompatible(f"{by_place[place]} and {name} are names of the same tensor")
        by_place[place] = name
        places[name] = place
    return places


def megatron_name(projection: str, half: str) -> str:
    """Of a pair of a projection's own, as an export writes it."""
    tail = "linear_in.weight" if half == "A" else "linear_out.weight"
    kind = kind_of(projection)
    if kind == "lm_head":
        return f"output_layer.adapter.{tail}"
    layer, short = int(projection.split(".")[2]), kind.removesuffix("_proj")
    [(module, shorts)] = [(module, shorts) for module, shorts in _MODULES.items() if short in shorts]
    own = f"adapter_{short}." if len(shorts) > 1 else ""
    return f"decoder.layers.{layer}.{'.'.join(module)}.adapter.{own}{tail}"
