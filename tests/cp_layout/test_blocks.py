import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_layout.blocks import BlockHasher, cache_identity, reusable_tokens
from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout

IDENTITY = cache_identity({"model": "owl-1", "dtype": "bfloat16"})
TOKENS = [3 * t % 101 for t in range(96)]


def hasher(layout: Layout, identity: bytes = IDENTITY, salt: bytes = b"") -> BlockHasher:
    return BlockHasher(layout, identity, salt)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_a9_whole_blocks_are_named_alike_under_every_cp(cp: int) -> None:
    whole = hasher(Layout(cp, 8, 8))
    assert (whole.unit_tokens, whole.units_per_virtual_block) == (8, cp)
    assert whole.hashes(TOKENS) == hasher(Layout(1, 8, 8)).hashes(TOKENS)


@pytest.mark.parametrize("interleave", [1, 4, 8, 32])
def test_a9_one_shard_is_free_of_the_interleave_law(interleave: int) -> None:
    assert hasher(Layout(1, interleave, 8)).hashes(TOKENS) == hasher(Layout(2, 8, 8)).hashes(TOKENS)


def test_a9_layouts_with_scattered_blocks_never_meet() -> None:
    layouts = [
        Layout(1, 8, 8),
        Layout(2, 1, 8),
        Layout(2, 4, 8),
        Layout(4, 1, 8),
        Layout(4, 1, 4),
        Layout(2, 1, 16),
        Layout(8, 1, 2),
    ]
    digests = [digest for layout in layouts for digest in hasher(layout).hashes(TOKENS)]
    assert len(set(digests)) == len(digests)
    scattered = hasher(Layout(2, 1, 8))
    assert (scattered.unit_tokens, scattered.units_per_virtual_block) == (16, 1)


def test_a9_identity_and_salt_separate_caches() -> None:
    layout = Layout(2, 8, 8)
    other = cache_identity({"model": "owl-1", "dtype": "float32"})
    hashers = [hasher(layout), hasher(layout, other), hasher(layout, salt=b"a"), hasher(layout, salt=b"a\0")]
    hashers += [
        hasher(layout, b"xy", b"z"),
        hasher(layout, b"y", b"zx"),
        hasher(layout, b"yx", b"z"),
        hasher(layout, b"", b"zxy"),
    ]
    digests = [h.hashes(TOKENS)[0] for h in hashers] + [hasher(Layout(1, 4, 4)).hashes(TOKENS)[0]]
    assert len(set(digests)) == len(digests)


def test_identity_is_a_digest_of_names_types_and_values() -> None:
    assert cache_identity({"dtype": "bfloat16", "model": "owl-1"}) == IDENTITY
    facts: list[dict[str, str | int]] = [{"a": "1"}, {"a": 1}, {"b": 1}, {"a": "1b", "c": ""}, {"a": "1", "bc": ""}, {}]
    assert len({cache_identity(fact) for fact in facts}) == len(facts)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.sampled_from([Layout(2, 4, 4), Layout(3, 2, 4), Layout(1, 1, 5)]))
def test_extending_unit_by_unit_is_the_same_chain(tokens: list[int], layout: Layout) -> None:
    names = hasher(layout)
    unit = names.unit_tokens
    chain, digest = [], names.root
    for start in range(0, len(tokens) // unit * unit, unit):
        digest = names.extend(digest, tokens[start : start + unit])
        chain.append(digest)
    assert names.hashes(tokens) == chain
    assert len(chain) == len(tokens) // unit


@given(st.integers(0, 95))
def test_a_changed_token_changes_its_unit_and_all_later_ones(changed: int) -> None:
    names = hasher(Layout(2, 8, 8))
    before = names.hashes(TOKENS)
    after = names.hashes([token + (index == changed) for index, token in enumerate(TOKENS)])
    assert [a == b for a, b in zip(before, after, strict=True)] == [unit < changed // 8 for unit in range(12)]


def test_equal_units_at_different_places_have_different_names() -> None:
    chain = hasher(Layout(1, 4, 4)).hashes([7] * 16)
    assert len(set(chain)) == 4


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_f1_hit_never_reaches_past_the_common_prefix(cp: int) -> None:
    names = hasher(Layout(cp, 4, 4))
    first, second = [7] * 9 + [1] * 20, [7] * 9 + [2] * 20
    common = [a == b for a, b in zip(names.hashes(first), names.hashes(second), strict=True)]
    units = common.index(False)
    assert units * names.unit_tokens == 8
    assert not any(common[units:])


def test_f1_scattered_layout_hits_whole_virtual_blocks() -> None:
    names = hasher(Layout(2, 2, 4))
    first, second = [7] * 9 + [1] * 20, [7] * 9 + [2] * 20
    common = [a == b for a, b in zip(names.hashes(first), names.hashes(second), strict=True)]
    assert common == [True, False, False]


@pytest.mark.parametrize("layout", [Layout(1, 4, 4), Layout(2, 4, 4), Layout(2, 1, 4), Layout(4, 4, 4)], ids=str)
def test_f2_at_least_one_token_is_recomputed(layout: Layout) -> None:
    v = layout.virtual_block_size
    expected = {0: 0, 1: 0, v: 0, v + 1: v, 2 * v: v, 2 * v + 1: 2 * v, 3 * v - 1: 2 * v}
    assert {length: reusable_tokens(length, layout) for length in expected} == expected


@given(st.integers(1, 10**6), st.integers(1, 8), st.integers(1, 64))
def test_f2_reusable_tokens_are_the_largest_legal_hit(length: int, cp: int, block_size: int) -> None:
    layout = Layout(cp, block_size, block_size)
    hit = reusable_tokens(length, layout)
    assert hit % layout.virtual_block_size == 0
    assert hit < length <= hit + layout.virtual_block_size


@pytest.mark.parametrize(
    ("prev", "tokens", "message"),
    [
        (b"", [1, 2, 3, 4], "digest of 32 bytes, got 0"),
        (bytes(32), [1, 2, 3], "hash unit has 4 tokens, got 3"),
        (bytes(32), [1, 2, 3, 4, 5], "hash unit has 4 tokens, got 5"),
        (bytes(32), [1, 2, 3, -1], "not an integer in 0 to"),
        (bytes(32), [1, 2, 3, 2**32], "not an integer in 0 to"),
    ],
)
def test_units_that_are_not_whole_are_refused(prev: bytes, tokens: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        hasher(Layout(2, 4, 4)).extend(prev, tokens)
