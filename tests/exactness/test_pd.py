"""A request that is prefilled on one set of ranks and decoded on another, of any other layout: the tokens of one set."""

import asyncio
import itertools
import random
from collections import Counter

import pytest

from cp_layout.reshard import Side
from tests.exactness.test_mla import MODELS as LATENT
from tests.inproc import Shape
from tests.layout_pairs import layouts, lengths, on_grids
from tests.pd import Pair, pair
from tests.tiny_models import greedy_reference

NEW_TOKENS = 4
GQA = {
    1: {"heads": 8, "kv_heads": 1},
    2: {"heads": 8, "kv_heads": 2},
    3: {"heads": 6, "kv_heads": 3, "hidden": 48, "ffn": 100},
    4: {"heads": 8, "kv_heads": 4},
}


def shape_of(side: Side) -> Shape:
    grid, layout = side.grid, side.layout
    sizes = {"interleave": layout.interleave, "block_size": layout.block_size}
    return Shape(tp=grid.tp, pcp=grid.pcp, dcp=grid.dcp, **sizes, blocks=96, budget=32)


def spread_pairs() -> list[tuple[str, dict, Shape, Shape]]:
    """Every pair of layouts with two of the seven models, nearly always one that has KV heads and one with a latent.

    A Latin square: of the 14 layouts each is source four times and target four times with every model. The values that
    arrive are looked at for the whole product of layouts and heads elsewhere (`tests/kv_transfer/test_all_pairs.py`).
    """
    models = [(f"kv{kv_heads}", kv_heads, model) for kv_heads, model in GQA.items()]
    models += [(name, None, model) for name, model in LATENT.items()]
    order = random.Random(8).sample(layouts(), len(layouts()))
    pairs = []
    for number, (name, kv_heads, model) in enumerate(models):
        turns = {number, (number + 3) % len(models)}
        numbered = itertools.product(enumerate(order), enumerate(order))
        mine = [(source, target) for (row, source), (column, target) in numbered if (column - row) % len(models) in turns]
        pairs += [(name, model, *map(shape_of, ends)) for ends in on_grids(mine, kv_heads, seed=name)]
    return pairs


def some_pairs() -> list[tuple[str, dict, Shape, Shape]]:
    """One of every model, on two sides that differ."""
    chooser, chosen = random.Random(11), []
    for name in dict.fromkeys(each[0] for each in spread_pairs()):
        mine = [each for each in spread_pairs() if each[0] == name and each[2] != each[3]]
        chosen.append(chooser.choice(mine))
    return chosen


def named(case: object) -> str:
    if isinstance(case, Shape):
        return f"{case.tp}.{case.pcp}.{case.dcp}-I{case.interleave}-B{case.block_size}"
    return case if isinstance(case, str) else ""


async def move_and_decode(running: Pair, model, prompt: list[int]) -> None:
    """Every number of the prompt's KV arrives at its places, nothing else is written, and the tokens are those of one set."""
    running.empty()
    moved, handle = await running.begin(prompt, room=NEW_TOKENS)
    await running.lease(moved)
    answers = await running.pull(moved)
    assert not any(answer.HasField("failure") for answer in answers), answers
    pool, side = running.target.executors[0].pool, running.target.side
    token_head = pool.bytes_per_block // pool.block_size // pool.num_kv_heads
    assert sum(answer.payload_bytes for answer in answers) == len(prompt) * side.heads * side.copies * token_head
    for rank, executor in enumerate(running.target.executors):
        own = running.target.layout.local_len(
            running.target.layout.shard_on(running.target.grid.dcp_member(rank), moved.target_offset), len(prompt)
        )
        assert running.target.written(rank) * pool.dtype.itemsize == own * executor.pool.bytes_per_block // pool.block_size
    assert set(await running.end(moved)) == {"cancelled"}
    await running.drop(handle)
    assert await running.decode(moved, NEW_TOKENS - 1) == greedy_reference(model, prompt, NEW_TOKENS)
    running.check_nothing_is_left()


async def check(model, source: Shape, target: Shape) -> None:
    """1 token, and around the end of either side's first virtual block."""
    chooser = random.Random(3)
    async with pair(model, source, target) as running:
        for length in lengths(source.dcp * source.block_size, target.dcp * target.block_size):
            await move_and_decode(running, model, [chooser.randrange(250) for _ in range(length)])


@pytest.mark.parametrize(("name", "model", "source", "target"), some_pairs(), ids=named)
async def test_a9_tokens_of_pairs_of_layouts(tiny, name, model, source, target):
    await check(tiny(**model), source, target)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "model", "source", "target"), spread_pairs(), ids=named)
async def test_a9_tokens_of_every_pair_of_layouts_with_two_models(tiny, name, model, source, target):
    await check(tiny(**model), source, target)


def test_every_model_has_every_layout_on_either_end_and_every_pair_has_two_models() -> None:
    def layout(shape: Shape) -> tuple[int, int, int]:
        return shape.dcp, shape.interleave, shape.block_size

    pairs = Counter((layout(source), layout(target)) for _, _, source, target in spread_pairs())
    assert len(pairs) == len(layouts()) ** 2 and set(pairs.values()) == {2}
    for end in (2, 3):
        used = Counter((each[0], layout(each[end])) for each in spread_pairs())
        assert len(used) == 7 * len(layouts()) and set(used.values()) == {4}


@pytest.mark.parametrize("kv_heads", [1, 4])
async def test_h2_chunks_move_while_later_ones_are_computed(tiny, kv_heads):
    """The pull of what is committed and the next step run at the same time; the last range is what the last step brought."""
    model = tiny(**GQA[kv_heads])
    source = Shape(tp=2, pcp=2, dcp=2, interleave=2, block_size=4, budget=8)
    target = Shape(tp=1, interleave=4, block_size=4)
    prompt = [random.Random(4).randrange(250) for _ in range(45)]
    async with pair(model, source, target) as running:
        moved, request = running.submit(prompt, NEW_TOKENS)
        sampled, arrived, pulls = running.source.generations[request.handle].token_ids, 0, 0
        while arrived < len(prompt):
            ready = min(request.num_computed, len(prompt))
            if ready > arrived:
                running.look(moved, request)
            step = None if sampled else asyncio.create_task(asyncio.to_thread(running.source.step))
            if ready > arrived:
                await running.lease(moved, ready)
                answers = await running.pull(moved, arrived, ready)
                assert not any(answer.HasField("failure") for answer in answers), answers
                arrived, pulls = ready, pulls + 1
            if step is not None:
                await step
        assert pulls >= 4
        moved.tokens.append(sampled[0])
        await running.end(moved)
        await running.drop(request.handle)
        assert await running.decode(moved, NEW_TOKENS - 1) == greedy_reference(model, prompt, NEW_TOKENS)
        running.check_nothing_is_left()


@pytest.mark.parametrize("name", ["gqa", "latent"])
async def test_pools_of_one_host_are_copied_from(tiny, name):
    """The same through shared memory: no byte of KV crosses a connection."""
    model = tiny(**(GQA[2] if name == "gqa" else LATENT["v3"]))
    source = Shape(tp=2, pcp=2, dcp=2, interleave=1, block_size=4, pool_is_shared=True)
    target = Shape(tp=4, interleave=4, block_size=4)
    prompt = [random.Random(9).randrange(250) for _ in range(23)]
    async with pair(model, source, target, host="here") as running:
        moved, handle = await running.begin(prompt, NEW_TOKENS)
        await running.lease(moved)
        for answer in await running.pull(moved):
            assert answer.shared_bytes == answer.payload_bytes > 0 and not answer.HasField("failure")
        await running.end(moved)
        await running.drop(handle)
        assert await running.decode(moved, NEW_TOKENS - 1) == greedy_reference(model, prompt, NEW_TOKENS)
