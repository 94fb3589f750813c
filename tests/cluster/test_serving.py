"""What a user of a running cluster sees."""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from cp_client import Client, errors
from cp_wire.channels import open_sync_channel
from tests import smollm2_reference

pytestmark = pytest.mark.cluster

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def reference():
    return smollm2_reference.load()


def test_greedy_ids_and_logprobs_of_the_reference(smollm2, reference):
    for case, count in ((reference[0], 64), (reference[5], 16)):
        got = smollm2.client.complete(
            token_ids=case["prompt_ids"], max_tokens=count, temperature=0.0, ignore_eos=True, top_logprobs=20
        )
        assert list(got.token_ids) == case["output_ids"][:count]
        for expected, actual in zip(case["top_logprobs"], got.logprobs, strict=False):
            smollm2_reference.assert_close(expected, dict(actual.top))


def test_text_prompts_are_tokenised_as_the_reference_does(smollm2, reference):
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(smollm2.client.complete, case["prompt"], max_tokens=24, temperature=0.0, ignore_eos=True)
            for case in reference[:5]
        ]
        for case, future in zip(reference, futures, strict=False):
            assert list(future.result(DEADLINE_S).token_ids) == case["output_ids"][:24]


def test_generate_command_prints_one_document(smollm2, kvloom_json, reference):
    case = reference[0]
    ids = ",".join(map(str, case["prompt_ids"]))
    got = kvloom_json(
        "generate", "--target", smollm2.address, "--token-ids", ids, "--max-tokens", "5", "--temperature", "0", "--ignore-eos"
    )
    assert got["token_ids"] == case["output_ids"][:5]
    assert got["finish_reason"] == "length"
    assert got["usage"]["prompt_tokens"] == len(case["prompt_ids"])
    assert got["usage"]["completion_tokens"] == 5
    assert set(got["timing"]) >= {"ttft_ms", "tpot_ms"}
    assert got["route"]["ranks"] == [0, 1]
    assert got["route"]["cp"] == 2


def test_generate_streams_text_and_chat_uses_the_template(smollm2, kvloom):
    words = ("--max-tokens", "8", "--temperature", "0", "Say hello.")
    for flags, prompt in (
        ((), {"prompt": "Say hello."}),
        (("--chat",), {"messages": [{"role": "user", "content": "Say hello."}]}),
    ):
        expected = smollm2.client.complete(**prompt, max_tokens=8, temperature=0.0)
        status, out, err = kvloom("generate", "--target", smollm2.address, *flags, *words)
        assert (status, out.strip()) == (0, expected.text.strip()), err


def test_chat_and_text_are_different_prompts(smollm2):
    text = smollm2.client.complete("Say hello.", max_tokens=8, temperature=0.0)
    chat = smollm2.client.complete(messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0.0)
    assert chat.usage.prompt_tokens > text.usage.prompt_tokens
    assert chat.text != text.text


def test_metrics_of_a_running_cluster(smollm2, metrics_port):
    def scrape() -> dict[str, float]:
        connection = HTTPConnection("127.0.0.1", metrics_port, timeout=DEADLINE_S)
        connection.request("GET", "/metrics")
        families = text_string_to_metric_families(connection.getresponse().read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    before = scrape()
    smollm2.client.complete(token_ids=[1] * 70, max_tokens=5, temperature=0.0, ignore_eos=True, cache_salt="metrics")
    after = scrape()
    grown = {name: after[name] - before[name] for name in after}
    assert (grown["kvloom_prompt_tokens_total"], grown["kvloom_output_tokens_total"]) == (70, 5)
    assert grown["kvloom_step_duration_seconds_count"] == 5
    assert 0 < grown["kvloom_step_collective_seconds_total"] < grown["kvloom_step_rank_seconds_total"]
    assert after["kvloom_prefix_cache_hit_unit_tokens"] == 32


def test_status_command_has_the_fixed_fields(smollm2, kvloom_json):
    got = kvloom_json("status", "--target", smollm2.address)
    assert [rank["rank"] for rank in got["ranks"]] == [0, 1]
    for rank in got["ranks"]:
        assert (rank["state"], rank["kv_blocks_total"]) == ("ready", 64)
        assert set(rank) >= {"role", "instance", "pid", "kv_blocks_free", "last_progress_ms"}
    assert got["config"]["interleave"] == 4
    assert (got["running"], got["waiting"]) == (0, 0)


def test_stop_strings_end_the_text_before_them(smollm2):
    plain = smollm2.client.complete("Count: one, two,", max_tokens=24, temperature=0.0)
    word = plain.text.split()[2]
    got = smollm2.client.complete("Count: one, two,", max_tokens=24, temperature=0.0, stop=[word])
    assert got.finish_reason == "stop"
    assert got.text == plain.text[: plain.text.index(word)]


def test_the_same_seed_gives_the_same_text_alone_and_in_company(smollm2):
    def ask(seed: int) -> tuple[int, ...]:
        return smollm2.client.complete("A short tale:", max_tokens=16, temperature=1.0, seed=seed).token_ids

    alone = ask(5)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(ask, (5, 6, 7)))
    assert together[0] == alone
    assert len(set(together)) == 3


def test_health_and_reflection(smollm2):
    with open_sync_channel(smollm2.address, "control") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=DEADLINE_S)
        names = {service.name for service in listed.list_services_response.service}
        assert names > {f"kvloom.v1.{name}Service" for name in ("Inference", "Control", "Registry")}


def test_j5_the_effective_configuration_is_told(smollm2):
    config = smollm2.client.config()
    assert (config.pcp, config.dcp, config.interleave, config.block_size) == (2, 2, 4, 16)
    assert (config.dtype, config.kv_cache_dtype, config.collectives) == ("float32", "float32", "shm")
    assert (config.kv_cache_tokens_per_rank, config.max_model_len) == (1024, 1800)
    assert config == smollm2.status().config


BAD = [
    ({"token_ids": []}, "prompt"),
    ({"token_ids": [49152]}, "token"),
    ({"token_ids": [1], "max_tokens": 0}, "max_tokens"),
    ({"token_ids": [1], "max_tokens": 2**31}, "max_tokens"),
    ({"token_ids": [1] * 1700, "max_tokens": 101}, "max_model_len"),
    ({"token_ids": [1], "temperature": float("nan")}, "temperature"),
    ({"token_ids": [1], "temperature": -0.1}, "temperature"),
    ({"token_ids": [1], "top_p": 0.0}, "top_p"),
    ({"token_ids": [1], "top_p": 1.5}, "top_p"),
    ({"token_ids": [1], "stop": ["x"] * 17}, "stop"),
    ({"token_ids": [1], "stop": ["x" * 257]}, "stop"),
    ({"token_ids": [1], "stop": [""]}, "stop"),
]


@pytest.mark.parametrize(("fields", "word"), BAD, ids=[f"{i}-{word}" for i, (_, word) in enumerate(BAD)])
def test_l4_bad_requests_are_refused_and_the_next_one_works(smollm2, fields, word):
    with pytest.raises(errors.InvalidRequest) as caught:
        smollm2.client.complete(**{"max_tokens": 4, **fields})
    assert word in str(caught.value)
    assert not caught.value.retryable
    assert len(smollm2.client.complete(token_ids=[1, 2], max_tokens=1).token_ids) == 1
    smollm2.wait_for(smollm2.all_blocks_free, DEADLINE_S, "all blocks free")


def test_bad_input_on_the_command_line_exits_2(smollm2, kvloom):
    status, out, err = kvloom("generate", "--target", smollm2.address, "--token-ids", "1", "--max-tokens", "0")
    assert (status, out) == (2, "")
    assert "max_tokens" in err
    assert len(err.strip().splitlines()) == 1


def test_unreachable_target_exits_1(kvloom):
    status, _, err = kvloom("status", "--target", "127.0.0.1:1", "--json")
    assert status == 1
    assert len(err.strip().splitlines()) == 1


def test_duplicate_active_id_is_refused(smollm2):
    with smollm2.client.generate(token_ids=[1, 2, 3], max_tokens=200, ignore_eos=True, request_id="twin") as first:
        next(first)
        with pytest.raises(errors.Duplicate):
            smollm2.client.complete(token_ids=[1], max_tokens=1, request_id="twin")
    smollm2.wait_for(smollm2.all_blocks_free, DEADLINE_S, "all blocks free")


def test_abort_ends_the_stream_with_its_reason(smollm2):
    stream = smollm2.client.generate(token_ids=[1, 2, 3], max_tokens=500, ignore_eos=True, request_id="doomed")
    next(stream)
    smollm2.client.abort("doomed")
    assert list(stream)[-1].finish_reason == "abort"
    smollm2.wait_for(smollm2.all_blocks_free, DEADLINE_S, "all blocks free")


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_a_client_that_leaves_frees_its_blocks(smollm2, when):
    """Four requests fill the seats, so a fifth is queued; a long prompt is still in prefill right after it was accepted."""
    if when == "queued":
        fillers = [smollm2.client.generate(token_ids=[i], max_tokens=60, ignore_eos=True) for i in range(1, 5)]
        for filler in fillers:
            next(filler)
        with Client(smollm2.address) as other:
            stream = other.generate(token_ids=[9, 9], max_tokens=50)
            smollm2.wait_for(lambda: smollm2.status().waiting == 1, DEADLINE_S, "a queued request")
            stream.close()
            smollm2.wait_for(lambda: smollm2.status().waiting == 0, DEADLINE_S, "an empty queue")
        for filler in fillers:
            filler.close()
    else:
        with Client(smollm2.address) as other:
            prompt = [7] * (1500 if when == "prefill" else 4)
            stream = other.generate(token_ids=prompt, max_tokens=100, ignore_eos=True)
            if when == "decode":
                next(stream)
                next(stream)
            else:
                smollm2.wait_for(lambda: not smollm2.all_blocks_free(), DEADLINE_S, "the prompt's first blocks")
            stream.close()
    smollm2.wait_for(smollm2.all_blocks_free, DEADLINE_S, "all blocks free")
    smollm2.wait_for(lambda: smollm2.status().running == 0, DEADLINE_S, "no running request")


def test_prefix_hits_are_reported_in_whole_virtual_blocks(smollm2):
    prompt = list(range(1000, 1000 + 2 * 32 + 1))
    first, second = (smollm2.client.complete(token_ids=prompt, max_tokens=4, temperature=0.0) for _ in range(2))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 64)
    assert first.token_ids == second.token_ids
    assert smollm2.status().prefix_cache.hit_unit_tokens == 32


def test_k5_one_client_from_several_threads(smollm2):
    got: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        got[i] = smollm2.client.complete(token_ids=[40, 41], max_tokens=6, temperature=0.0, ignore_eos=True).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(got) == 4
    assert len(set(got.values())) == 1


def test_errors_carry_their_status_code(smollm2):
    with pytest.raises(errors.KvloomError) as caught:
        smollm2.client.abort("nobody")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_json_mode_keeps_stdout_clean_on_refusal(smollm2, kvloom):
    status, out, err = kvloom("generate", "--target", smollm2.address, "--token-ids", "1", "--top-p", "7", "--json")
    assert (status, out) == (2, "")
    assert "top_p" in err
