"""Which part of each tensor a TP member holds, and which parts lie together in memory. Pure arithmetic on shapes.

The cuts themselves are `cp_layout.cuts`; the tensors of a checkpoint are `model_files.expected_tensors`. This table joins them.
"""

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


def _attended_heads(shape: ModelShape, tp: int, index: int) -> Span:
    return cut(shape.num_heads, tp, index)


def _ffn(shape: ModelShape, tp: int, index: int) -> Span:
    return cut(shape.intermediate_size, tp, index)


def _per_head(heads: Callable[[ModelShape, int, int], Span]) -> Callable[[ModelShape, int, int], Span]:
    def elements(shape: ModelShape, tp: int, index: int) -> Span:
        first, last = heads(shape, tp, index)
        return first * shape.head_dim, last * shape.head_dim

    return elements


RULES: Mapping[str, Rule | None] = {
    "embed_tokens": Rule("rows", vocabulary),
    "q_proj": Rule("rows", _per_head(query_heads)),
    "k_proj": Rule("rows", _per_head(key_heads)),
    "v_proj": Rule("rows", _per_head(key_heads)),
    "o_proj": Rule("columns", _per_head(_attended_heads)),
    "gate_proj": Rule("rows", _ffn),
    "up_proj": Rule("rows", _ffn),
    "down_proj": Rule("columns", _ffn),
    "lm_head": Rule("rows", vocabulary),
    "q_norm": None,
    "k_norm": None,
    "input_layernorm": None,
    "post_attention_layernorm": None,
    "norm": None,
}
"""Kind of tensor (last but one component of its name) → its rule; None = every member holds the whole."""

FUSED: Mapping[str, str] = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Kind → the kind it is stacked into, in the order of the checkpoint's list."""


def part_of(name: str, dims: tuple[int, ...], shape: ModelShape, tp: int, index: int) -> TensorPart:
    """The part of the tensor `name`, whole shape `dims`, that TP member `index` of `tp` holds."""
    rule = RULES[_kind(name)]
    if rule is None:
        return TensorPart(name, dims, (0, dims[0]), None)
    span = rule.span(shape, tp, index)
    return TensorPart(name, dims, span, None) if rule.axis == "rows" else TensorPart(name, dims, (0, dims[0]), span)


def resident_tensors(shape: ModelShape, tp: int, index: int) -> tuple[ResidentTensor, ...]:
    """Everything TP member `index` of `tp` holds, in checkpoint order."""
    stacks: dict[str, list[TensorPart]] = {}
    for name, dims in expected_tensors(shape).items():
        kind = _kind(name)
        resident = name.replace(kind, FUSED[kind]) if kind in FUSED else name
        stacks.setdefault(resident, []).append(part_of(name, dims, shape, tp, index))
    return tuple(ResidentTensor(name, tuple(parts)) for name, parts in stacks.items())


def _kind(name: str) -> str:
    return name.split(".")[-2]
