"""Real clusters whose prompts and outputs are computed by different ranks."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from cp_client import errors
from tests import smollm2_reference
from tests.cluster.processes import kvloom_up
from tests.tiny_models import build_tiny_llama, greedy_reference

pytestmark = pytest.mark.cluster

SIDES = [
    "--prefill-ranks", "2", "--prefill.pcp", "2", "--prefill.dcp", "2", "--prefill.cp-kv-cache-interleave-size", "1",
    "--decode-ranks", "1",
]  # fmt: skip
SMALL = ["--block-size", "4", "--kv-cache-tokens-per-rank", "8192", "--max-num-batched-tokens", "32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("model"), heads=8, kv_heads=2)


def causes(counts) -> int:
    return sum(each.requests for each in counts)


def test_smollm2_ids_and_logprobs_are_those_of_one_process(tmp_path):
    flags = ["--dtype", "float32", "--kv-cache-tokens-per-rank", "2048", "--max-num-batched-tokens", "64"]
    with kvloom_up(*SIDES, *flags, log=tmp_path / "stderr") as running:
        routes = [end.route for end in smollm2_reference.assert_answers(running.client)]
        assert {(route.prefill_group, route.decode_group) for route in routes} == {((0, 1), (2,))}
        status = running.status()
        assert [rank.role for rank in status.ranks] == ["prefill", "prefill", "decode"]
        assert status.transfers.requests == len(routes) and not causes(status.transfers.recomputed)
        running.wait_for(running.all_blocks_free, 30, "all blocks free")


def test_unequal_layouts_mixed_lengths_and_prefix_hits(tmp_path, model):
    sides = [
        "--prefill-ranks", "2", "--prefill.tp", "2", "--prefill.block-size", "8",
        "--decode-ranks", "2", "--decode.pcp", "2", "--decode.dcp", "2", "--decode.cp-kv-cache-interleave-size", "2",
    ]  # fmt: skip
    rng = random.Random(5)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 7, 8, 9, 33, 100)]
    with kvloom_up(str(model), *sides, *SMALL, log=tmp_path / "stderr") as running, ThreadPoolExecutor(6) as pool:

        def answer(prompt: list[int]) -> list[int]:
            got = running.client.complete(token_ids=prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
            return list(got.token_ids)

        for _ in range(2):
            assert list(pool.map(answer, prompts)) == [greedy_reference(model, prompt, 12) for prompt in prompts]
        longer = [*prompts[-1], 5, 6, 7]
        assert answer(longer) == greedy_reference(model, longer, 12)
        status = running.status()
        assert status.prefix_cache.hit_tokens > 0
        tokens = 2 * sum(map(len, prompts)) + len(longer)
        per_token = 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head_dim, fp32: the pcp replicas hold one copy together
        assert 0 < status.transfers.payload_bytes < tokens * per_token, "decode's own prefix hits are not sent"
        running.wait_for(running.all_blocks_free, 30, "all blocks free")


def test_draws_penalties_and_completions_do_not_notice_the_border(tmp_path, model):
    rng = random.Random(11)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (5, 40, 64)]
    wanted = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}

    def answers(*flags: str) -> list[list[tuple[int, ...]]]:
        with kvloom_up(str(model), *flags, *SMALL, log=tmp_path / "stderr") as running:
            found = []
            for prompt in prompts:
                tokens: dict[int, list[int]] = {}
                for event in running.client.generate(token_ids=prompt, max_tokens=10, ignore_eos=True, n=3, **wanted):
                    tokens.setdefault(event.index, []).extend(event.token_ids)
                found.append([tuple(tokens[index]) for index in range(3)])
            running.wait_for(running.all_blocks_free, 30, "all blocks free")
            return found

    apart = answers(*SIDES)
    assert apart == answers()
    assert len(set(apart[0])) > 1


def test_preempted_on_the_decode_side_they_are_computed_there_again(tmp_path, model):
    """Five outputs outgrow the decode side's pool together: its own prefill goes on from prompt and output."""
    sizes = ["--block-size", "4", "--prefill.kv-cache-tokens-per-rank", "8192", "--decode.kv-cache-tokens-per-rank", "160"]
    rng = random.Random(13)
    prompts = [[rng.randrange(200) for _ in range(20 + 3 * number)] for number in range(5)]
    with kvloom_up(str(model), *SIDES, *sizes, log=tmp_path / "stderr") as running, ThreadPoolExecutor(5) as pool:
        calls = [
            pool.submit(running.client.complete, token_ids=prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
            for prompt in prompts
        ]
        answers = [list(call.result(60).token_ids) for call in calls]
        assert answers == [greedy_reference(model, prompt, 40) for prompt in prompts]
        status = running.status()
        assert status.prefix_cache.preemptions > 0
        assert status.transfers.requests == len(prompts) and not causes(status.transfers.recomputed)
        running.wait_for(running.all_blocks_free, 30, "all blocks free")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_h19_a_prefill_rank_killed_in_the_middle_of_a_move(tmp_path, model, policy):
    prompt = [random.Random(7).randrange(200) for _ in range(3500)]
    flags = ["--kv-load-failure-policy", policy, "--block-size", "4", "--kv-cache-tokens-per-rank", "8192"]
    chunks = ["--prefill.max-num-batched-tokens", "16", "--decode.max-num-batched-tokens", "512"]
    with kvloom_up(str(model), *SIDES, *flags, *chunks, log=tmp_path / "stderr") as running:
        victim = running.rank_pids()[1]
        with running.client.generate(token_ids=prompt, max_tokens=4, temperature=0.0, ignore_eos=True) as stream:
            running.wait_for(lambda: running.status().transfers.ranges > 2, 30, "the first ranges")
            os.kill(victim, signal.SIGKILL)
            if policy == "fail":
                with pytest.raises(errors.Unavailable) as caught:
                    list(stream)
                assert caught.value.retryable
            else:
                assert [token for event in stream for token in event.token_ids] == greedy_reference(model, prompt, 4)
        transfers = running.status().transfers
        assert (causes(transfers.recomputed), causes(transfers.failed)) == ((0, 1) if policy == "fail" else (1, 0))

        def replaced() -> bool:
            status = running.status()
            return status.state == "serving" and status.ranks[1].pid != victim

        running.wait_for(replaced, 60, "a new rank 1")
        moved = running.status().transfers.requests
        got = running.client.complete(token_ids=[1, 2, 3], max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(got.token_ids) == greedy_reference(model, [1, 2, 3], 8)
        assert running.status().transfers.requests == moved + 1
        running.wait_for(running.all_blocks_free, 30, "all blocks free")


def test_a_decode_rank_killed_is_replaced(tmp_path, model):
    with kvloom_up(str(model), *SIDES, *SMALL, log=tmp_path / "stderr") as running:
        victim = running.rank_pids()[2]
        with running.client.generate(token_ids=[1, 2, 3], max_tokens=3000, ignore_eos=True) as stream:
            next(stream)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(errors.Unavailable) as caught:
                list(stream)
            assert caught.value.retryable and "rank 2" in str(caught.value)
        running.wait_for(lambda: running.status().state == "serving" and running.rank_pids()[2] != victim, 60, "a new rank 2")
        got = running.client.complete(token_ids=[1, 2, 3], max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(got.token_ids) == greedy_reference(model, [1, 2, 3], 8)
        running.wait_for(running.all_blocks_free, 30, "all blocks free")
