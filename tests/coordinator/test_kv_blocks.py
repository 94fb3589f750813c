from dataclasses import replace

import pytest

from coordinator.kv_blocks import KvBlocks
from coordinator.plan import Sampling
from coordinator.prefix_cache import PrefixCache
from coordinator.request import Request
from cp_layout.interleave import Layout

LAYOUTS = [
    Layout(1, 4, 4),
    Layout(2, 4, 4),
    Layout(2, 1, 4),
    Layout(2, 2, 4),
    Layout(4, 4, 4),
    Layout(4, 1, 4),
    Layout(1, 16, 4),
]


class Blocks:
    """Requests that compute their whole prompt at once."""

    def __init__(self, layout: Layout, blocks: int = 100, identity: bytes = b"model") -> None:
        self.kv = KvBlocks(layout, blocks, identity)
        self.handles = 0

    def start(self, prompt: list[int], salt: bytes = b"") -> tuple[Request, int]:
        """Admits and computes; returns the request and its hit in tokens."""
        self.handles += 1
        request = Request(self.handles, "r", list(prompt), Sampling(), salt)
        self.kv.open(request)
        placement = self.kv.place(request)
        before = self.kv.free_blocks
        request.shard_offset, request.num_computed = placement.shard_offset, placement.num_cached_tokens
        self.kv.admit(request, placement)
        self.kv.grow(request, self.kv.missing(request, len(prompt)))
        after = self.kv.free_blocks
        assert tuple(b - a for b, a in zip(before, after, strict=True)) == placement.free_needed
        request.num_computed = len(prompt)
        self.kv.register(request, request.num_computed)
        return request, placement.num_cached_tokens

    def stop(self, request: Request) -> None:
        self.kv.release(request)
        self.kv.close(request)

    def hit(self, prompt: list[int], salt: bytes = b"") -> int:
        """Hit of a prompt that comes and goes."""
        request, hit = self.start(prompt, salt)
        self.stop(request)
        return hit


def _opened(blocks: Blocks, prompt: list[int]) -> Request:
    blocks.handles += 1
    request = Request(blocks.handles, "r", prompt, Sampling())
    blocks.kv.open(request)
    return request


def _would_hit(blocks: Blocks, prompt: list[int]) -> int:
    request = _opened(blocks, prompt)
    hit = blocks.kv.place(request).num_cached_tokens
    blocks.kv.close(request)
    return hit


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_f2_hits_are_whole_virtual_blocks_and_leave_a_token_to_compute(layout):
    v = layout.virtual_block_size
    for length, hit in ((v, 0), (v + 1, v), (2 * v, v), (2 * v + 1, 2 * v), (3 * v - 1, 2 * v)):
        blocks = Blocks(layout)
        assert blocks.hit(list(range(length))) == 0
        assert blocks.hit(list(range(length))) == hit


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_f1_a_hit_ends_where_the_prompts_part(cp):
    layout = Layout(cp, 4, 4)
    blocks = Blocks(layout)
    blocks.hit([7] * 9 + [1] * 20)
    assert blocks.hit([7] * 9 + [2] * 20) == 9 // layout.virtual_block_size * layout.virtual_block_size


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tenants_and_models_do_not_share_prefixes(layout):
    prompt = list(range(3 * layout.virtual_block_size))
    blocks = Blocks(layout)
    blocks.hit(prompt, b"one")
    assert blocks.hit(prompt, b"two") == 0
    assert blocks.hit(prompt) == 0
    assert blocks.hit(prompt, b"one") == 2 * layout.virtual_block_size


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_hit_beside_its_living_owner_shares_blocks_and_a_late_one_revives_them(layout):
    prompt = list(range(2 * layout.virtual_block_size + 1))
    blocks = Blocks(layout)
    owner, _ = blocks.start(prompt)
    free = blocks.kv.free_blocks
    guest, hit = blocks.start(prompt)
    assert hit == 2 * layout.virtual_block_size
    assert sum(free) - sum(blocks.kv.free_blocks) == 1
    blocks.stop(owner)
    assert sum(blocks.kv.free_blocks) - sum(free) == 0
    blocks.stop(guest)
    assert blocks.kv.free_blocks == (100,) * layout.num_shards
    assert _would_hit(blocks, prompt) == hit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_one_growth_ascend_also_when_all_are_evicted(layout):
    """Tails are evicted first, so that a prompt which takes the place of another one finds the blocks in descending order."""
    blocks = Blocks(layout, blocks=12)
    length = 12 * layout.num_shards * layout.block_size
    for start in range(3):
        request, _ = blocks.start([start] * length)
        for member in range(layout.num_shards):
            assert blocks.kv.columns(request, member, range(99)) == tuple(range(12))
            assert blocks.kv.columns(request, member, range(3, 5)) == (3, 4)
        blocks.stop(request)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_f4_tails_are_evicted_before_the_prefixes_they_continue(layout):
    """Pool of 6 virtual blocks; a chain of 4 is cached, then 2 to 6 virtual blocks of other tokens come by."""
    v = layout.virtual_block_size
    for others, left in ((2, 4), (3, 3), (4, 2), (5, 1), (6, 0)):
        blocks = Blocks(layout, blocks=6)
        blocks.hit(list(range(4 * v)))
        other, _ = blocks.start([5] * (others * v))
        blocks.stop(other)
        assert min(blocks.kv.free_blocks) == 6
        assert _would_hit(blocks, [*range(4 * v), 1]) == left * v


@pytest.mark.parametrize("layout", [Layout(4, 4, 4), Layout(4, 1, 4), Layout(4, 2, 4)], ids=str)
@pytest.mark.parametrize("member", range(4))
def test_f5_a_block_lost_on_one_member_ends_the_hit_for_all(layout, member):
    """A one-token request evicts one block of one member; the other parts of that virtual block are worth nothing then."""
    v = layout.virtual_block_size
    blocks = Blocks(layout, blocks=3)
    prompt = list(range(3 * v))
    owner, _ = blocks.start(prompt)
    blocks.stop(owner)
    thief = _opened(blocks, [9])
    thief.shard_offset = member
    blocks.kv.admit(thief, replace(blocks.kv.place(thief), shard_offset=member))
    assert _would_hit(blocks, [*prompt, 1]) == 3 * v
    blocks.kv.grow(thief, blocks.kv.missing(thief, 1))
    assert _would_hit(blocks, [*prompt, 1]) == 2 * v


def test_units_that_came_from_the_cache_are_not_offered_to_it_again(monkeypatch):
    blocks = Blocks(Layout(1, 4, 4), blocks=200)
    blocks.hit(list(range(400)))
    offered = []
    insert = PrefixCache.insert

    def counted(cache, digest, *unit):
        offered.append(digest)
        return insert(cache, digest, *unit)

    monkeypatch.setattr(PrefixCache, "insert", counted)
    assert blocks.hit([*range(400), 1, 2, 3, 4]) == 400
    assert len(offered) == 1


def test_a_request_cannot_be_forgotten_while_it_holds_blocks():
    blocks = Blocks(Layout(1, 4, 4))
    request, _ = blocks.start([1, 2, 3])
    with pytest.raises(RuntimeError, match="request 1 is forgotten while it holds blocks"):
        blocks.kv.close(request)


def test_clear_forgets_blocks_and_prefixes():
    blocks = Blocks(Layout(2, 4, 4))
    blocks.start(list(range(30)))
    blocks.kv.clear()
    assert (blocks.kv.free_blocks, blocks.kv.table_blocks) == ((100, 100), (0, 0))
    assert blocks.hit(list(range(30))) == 0


def test_an_evicted_block_does_not_come_back_under_its_old_name():
    blocks = Blocks(Layout(1, 4, 4), blocks=3)
    blocks.hit(list(range(9)))
    blocks.hit([5] * 12)
    assert blocks.hit(list(range(9))) == 0
    assert blocks.hit(list(range(9))) == 8
