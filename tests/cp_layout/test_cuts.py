import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.cuts import cut, kv_head_cut
from cp_layout.errors import LayoutError
from cp_layout.model_shape import DTYPE_BYTES, ModelShape


@given(st.integers(0, 200_000), st.integers(1, 64))
def test_parts_are_contiguous_near_equal_and_complete(size: int, parts: int) -> None:
    ranges = [cut(size, parts, index) for index in range(parts)]
    edges = [0, *(last for _, last in ranges)]
    assert [first for first, _ in ranges] == edges[:-1]
    assert edges[-1] == size
    widths = [last - first for first, last in ranges]
    assert max(widths) - min(widths) <= 1
    assert max(widths) == -(-size // parts)


def test_cut_of_sizes_that_do_not_divide() -> None:
    assert [last - first for first, last in (cut(1536, 9, i) for i in range(9))] == [170, 171, 171] * 3
    assert cut(49152, 9, 8) == (43690, 49152)


@pytest.mark.parametrize(("size", "parts", "index"), [(8, 4, 4), (8, 4, -1), (-1, 4, 0), (8, 0, 0)])
def test_parts_that_do_not_exist_are_refused(size: int, parts: int, index: int) -> None:
    with pytest.raises(LayoutError, match=f"part {index} of {parts}"):
        cut(size, parts, index)


def test_a11_kv_heads_by_tensor_parallel_member() -> None:
    assert [kv_head_cut(2, 4, i) for i in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [kv_head_cut(4, 2, i) for i in range(2)] == [(0, 2), (2, 4)]
    with pytest.raises(LayoutError, match="part 4 of 4"):
        kv_head_cut(2, 4, 4)


@pytest.mark.parametrize(
    ("tp", "kv_heads"),
    [(tp, kv_heads) for tp in range(1, 13) for kv_heads in range(1, 9) if tp % kv_heads == 0 or kv_heads % tp == 0],
)
def test_a_member_holds_the_kv_heads_its_q_heads_attend(tp: int, kv_heads: int) -> None:
    for num_heads in (max(tp, kv_heads), 3 * max(tp, kv_heads)):
        per_kv_head = num_heads // kv_heads
        for index in range(tp):
            first, last = cut(num_heads, tp, index)
            assert {q // per_kv_head for q in range(first, last)} == set(range(*kv_head_cut(kv_heads, tp, index)))


def shape(num_heads: int, num_kv_heads: int) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=3,
        hidden_size=num_heads * 8,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        intermediate_size=40,
        vocab_size=50,
        max_position=512,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_embeddings=True,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(("tp", "heads_per_rank"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_kv_bytes_per_token_count_the_heads_of_one_rank(tp: int, heads_per_rank: int) -> None:
    for dtype, size in DTYPE_BYTES.items():
        keys_and_values = [size] * 8 * heads_per_rank * 3 * 2
        assert shape(8, 4).kv_bytes_per_token(tp, dtype) == sum(keys_and_values)


def test_kv_bytes_of_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(LayoutError, match="dtype 'int3' is not known"):
        shape(8, 4).kv_bytes_per_token(1, "int3")
