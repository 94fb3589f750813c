"""Which part of each tensor a TP member holds, and which parts lie together in memory. Pure arithmetic on shapes.

A member holds a range of every tensor, all of it, or, of the experts of a mixture, all of some and nothing of the others.

The cuts themselves are `cp_layout.cuts`; the tensors of a checkpoint are `model_files.expected_tensors`. This table joins them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from cp_layout.cuts import cut, kv_head_cut
from cp_layout.model_shape import ModelShape
from model_files import expected_tensors

Span = tuple[int, int]
"""Half-open range of rows or columns."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the members of a TP group share one kind of tensor: span(shape, tp, index) along one axis."""

    axis: Literal["rows", "columns"]
    span: Callable[[ModelShape, int, int], Span]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What one member reads of one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's: (rows, columns) or (elements,)."""
    rows: Span
    columns: Span | None
    """None: whole rows."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape of the part."""
        columns = self.shape[1:] if self.columns is None else (self.columns[1] - self.columns[0],)
        return (self.rows[1] - self.rows[0], *columns)


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """One tensor in a rank's memory: parts of the checkpoint stacked along rows, so that one product serves them all."""

    name: str
    parts: tuple[TensorPart, ...]

    @property
    def full_precision(self) -> bool:
        """Whether it is kept in fp32 whatever the compute dtype: what decides about experts."""
        return _kind(self.name) == "gate"

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape in memory."""
        return (sum(part.dims[0] for part in self.parts), *self.parts[0].dims[1:])

    @property
    def num_elements(self) -> int:
        """Elements in memory."""
        return prod(self.dims)


def query_heads(shape: ModelShape, tp: int, index: int) -> Span:
    """Query heads that the member projects. Replicating q_proj over the ranks that gather Q would change this one rule."""
    return cut(shape.num_heads, tp, index)


def key_heads(shape: ModelShape, tp: int, index: int) -> Span:
    """KV heads that the member projects and stores; several members hold the same one when TP > KV heads."""
    return kv_head_cut(shape.num_kv_heads, tp, index)


def vocabulary(shape: ModelShape, tp: int, index: int) -> Span:
    """Token ids whose rows of the embedding and of the head the member holds."""
    return cut(shape.vocab_size, tp, index)


def experts(shape: ModelShape, tp: int, index: int) -> Span:
    """Experts of every mixture that the member holds, whole; (0, 0) in a model without."""
    return (0, 0) if shape.moe is None else cut(shape.moe.num_experts, tp, index)


def _attended_heads(shape: ModelShape, tp: int, index: int) -> Span:
    first, last = cut(shape.num_heads, tp, index)
    return first * shape.value_head_dim, last * shape.value_head_dim


def _queries(shape: ModelShape, tp: int, index: int) -> Span:
    first, last = query_heads(shape, tp, index)
    return first * shape.query_head_dim, last * shape.query_head_dim


def _keys(shape: ModelShape, tp: int, index: int) -> Span:
    first, last = key_heads(shape, tp, index)
    return first * shape.head_dim, last * shape.head_dim


def _keys_and_values_of_latents(shape: ModelShape, tp: int, index: int) -> Span:
    assert shape.mla is not None
    first, last = query_heads(shape, tp, index)
    width = shape.mla.qk_nope_head_dim + shape.mla.v_head_dim
    return first * width, last * width


def _ffn(shape: ModelShape, tp: int, index: int) -> Span:
    return cut(shape.intermediate_size, tp, index)


def _shared_experts(shape: ModelShape, tp: int, index: int) -> Span:
    assert shape.moe is not None
    return cut(shape.moe.shared_size, tp, index)


RULES: Mapping[str, Rule | None] = {
    "embed_tokens": Rule("rows", vocabulary),
    "q_proj": Rule("rows", _queries),
    "k_proj": Rule("rows", _keys),
    "v_proj": Rule("rows", _keys),
    "q_a_proj": None,
    "q_a_layernorm": None,
    "q_b_proj": Rule("rows", _queries),
    "kv_a_proj_with_mqa": None,
    "kv_a_layernorm": None,
    "kv_b_proj": Rule("rows", _keys_and_values_of_latents),
    "o_proj": Rule("columns", _attended_heads),
    "gate_proj": Rule("rows", _ffn),
    "up_proj": Rule("rows", _ffn),
    "down_proj": Rule("columns", _ffn),
    "shared_experts.gate_proj": Rule("rows", _shared_experts),
    "shared_experts.up_proj": Rule("rows", _shared_experts),
    "shared_experts.down_proj": Rule("columns", _shared_experts),
    "gate": None,
    "lm_head": Rule("rows", vocabulary),
    "q_norm": None,
    "k_norm": None,
    "input_layernorm": None,
    "post_attention_layernorm": None,
    "norm": None,
}
"""Kind of tensor (last but one component of its name, behind the one before where that makes a difference) → its rule;
None = every member holds the whole, as whoever holds an expert does."""

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")

FUSED: Mapping[str, str] = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_a_proj": "qkv_proj",
    "kv_a_proj_with_mqa": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Kind → the kind it is stacked into, in the order of the checkpoint's list."""


def part_of(name: str, dims: tuple[int, ...], shape: ModelShape, tp: int, index: int) -> TensorPart:
    """The part of the tensor `name`, whole shape `dims`, that TP member `index` of `tp` holds."""
    rule = None if _EXPERT.search(name) else _rule(name)
    if rule is None:
        return TensorPart(name, dims, (0, dims[0]), None)
    span = rule.span(shape, tp, index)
    return TensorPart(name, dims, span, None) if rule.axis == "rows" else TensorPart(name, dims, (0, dims[0]), span)


def resident_tensors(shape: ModelShape, tp: int, index: int) -> tuple[ResidentTensor, ...]:
    """Everything TP member `index` of `tp` holds, in checkpoint order."""
    stacks: dict[str, list[TensorPart]] = {}
    first, last = experts(shape, tp, index)
    for name, dims in expected_tensors(shape).items():
        expert = _EXPERT.search(name)
        if expert and not first <= int(expert[1]) < last:
            continue
        kind = _kind(name)
        resident = name.replace(kind, FUSED[kind]) if kind in FUSED else name
        stacks.setdefault(resident, []).append(part_of(name, dims, shape, tp, index))
    return tuple(ResidentTensor(name, tuple(parts)) for name, parts in stacks.items())


def _rule(name: str) -> Rule | None:
    parent = ".".join(name.split(".")[-3:-1])
    return RULES[parent] if parent in RULES else RULES[_kind(name)]


def _kind(name: str) -> str:
    return name.split(".")[-2]
