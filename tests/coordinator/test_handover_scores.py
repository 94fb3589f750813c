"""Scores of a prompt come from the side that computes it, each of them once."""

import asyncio

import pytest

from tests.coordinator.fake_rank import continuation
from tests.coordinator.handover import FINAL, PROMPT
from tests.coordinator.harness import Heard, cluster, eventually


def scores(heard: Heard) -> list[tuple[int, float]]:
    """Position and score of every prompt token, as they came."""
    return [
        (event.prompt_logprobs.start + offset, position.sampled)
        for event in heard.events
        if event.WhichOneof("event") == "prompt_logprobs"
        for offset, position in enumerate(event.prompt_logprobs.positions)
    ]


def expected_scores(prompt) -> list[tuple[int, float]]:
    return [(position, -float(token) if position else 0.0) for position, token in enumerate(prompt)]


async def test_prompt_scores_come_from_the_side_of_the_prompt():
    async with cluster(prefill={}) as harness:
        heard = await harness.generate(PROMPT, prompt_logprobs=0, max_tokens=3)
        assert scores(heard) == expected_scores(PROMPT)
        assert heard.token_ids == continuation(PROMPT, 3)


@pytest.mark.parametrize("late", ["end_pull", "end_lease"])
async def test_prompt_scores_come_once_when_a_move_fails_while_the_prompt_is_computed(late):
    """The step in flight at the failure ends while the move is being stopped, or while the output's set computes already."""
    prompt = [1 + number % 90 for number in range(100)]
    async with cluster(prefill={}, max_num_batched_tokens=8) as harness:
        source, target = harness.ranks
        end = source.kv.end_lease if late == "end_lease" else target.kv.end_pull
        asked, go = asyncio.Event(), asyncio.Event()

        async def delayed(request):
            asked.set()
            await go.wait()
            return await end(request)

        pulled = asyncio.create_task(target.kv.hold())
        call = asyncio.create_task(harness.generate(prompt, prompt_logprobs=0, max_tokens=3))
        await pulled
        await source.hold()
        assert len(source.steps) < 12, "the prompt is not through"
        setattr(source.kv if late == "end_lease" else target.kv, late, delayed)
        target.kv.failures = [FINAL]
        target.kv.gate.set()
        await asyncio.wait_for(asked.wait(), 5)
        if late == "end_lease":
            await target.hold()
        source.gate.set()
        committed = harness.coordinator.sets[0].serving.scheduler
        await eventually(lambda: not committed.running)
        go.set()
        target.gate.set()
        heard = await call
        assert heard.token_ids == continuation(prompt, 3)
        assert scores(heard) == expected_scores(prompt)
        await harness.until_idle()
