"""Which part of each tensor a TP member holds."""

from cp_layout.cuts import cut, kv_head_cut
from cp_layout.model_shape import ModelShape

Range = tuple[int, int]


def part_of(name: str, dims: tuple[int, ...], shape: ModelShape, tp: int, index: int) -> tuple[Range, Range | None]:
    head = shape.head_dim
    kind = name.split(".")[-2]
    if kind == "q_proj":
        first, last = cut(shape.num_heads, tp, index)
        return (first * head, last * head), None
    if kind in ("k_proj", "v_proj"):
        first, last = kv_head_cut(shape.num_kv_heads, tp, index)
        return (first * head, last * head), None
    if kind == "o_proj":
        first, last = cut(shape.num_heads, tp, index)
        return (0, dims[0]), (first * head, last * head)
    if kind in ("gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return cut(dims[0], tp, index), None
    if kind == "down_proj":
        return (0, dims[0]), cut(dims[1], tp, index)
    return (0, dims[0]), None
