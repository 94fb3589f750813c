"""Recorded decode passes in whole engines: to the bit what Python's passes give, step after step."""

import gc
import random
from dataclasses import replace

import pytest
import torch

from coordinator.plan import DecodeMode, Sampling
from rank_server import recorded
from rank_server.compiled import tape
from rank_server.compiled.tape import Recorder, Tape
from rank_server.models.decoder import DecoderModel
from rank_server.recorded import MOST_ROWS, RecordedPasses
from rank_server.worker import Worker
from tests.exactness.pcp import prompt_of
from tests.inproc import Shape, cluster

MODEL = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128}
LAYERS = 2
ONE = Shape(dtype="bfloat16", kv_dtype="bfloat16", blocks=96, budget=110, collectives="shm")
REPLICATED = frozenset({DecodeMode.REPLICATED})
SPLIT = REPLICATED | {DecodeMode.SPLIT}
ONE_TO_THREE = {(1, False), (2, False), (3, False)}
SPLIT_PASSES = {(1, True), (2, True), (3, True)}
CASES = {
    "one rank": (ONE, ONE_TO_THREE, set()),
    "tp 2": (replace(ONE, tp=2), ONE_TO_THREE, set()),
    "dcp in tp": (replace(ONE, tp=4, dcp=2, interleave=1), {(1, False)}, {(2, False), (3, False)}),
    "replicated": (replace(ONE, dcp=2, pcp=2, ways=REPLICATED), ONE_TO_THREE, set()),
    "split": (replace(ONE, pcp=2, dcp=2, ways=SPLIT), {(1, True)}, SPLIT_PASSES - {(1, True)}),
    "split over four": (replace(ONE, pcp=4, dcp=4, ways=SPLIT), {(1, True)}, SPLIT_PASSES - {(1, True)}),
    "split into unequal parts": (replace(ONE, pcp=3, dcp=3, ways=SPLIT), set(), SPLIT_PASSES),
    "local groups": (replace(ONE, pcp=2, dcp=2, ways=SPLIT, collectives="local"), set(), SPLIT_PASSES),
}
"""Cluster, and the passes (rows, split) of rank 0 that are recorded and those that can't be."""
SCARCE = 16
"""Blocks that two long requests would more than fill, of all shards."""
LENGTHS, LIMITS = (5, 37, 2), (4, 9, 26)


@pytest.fixture
def runs(monkeypatch):
    """Tapes that ran."""
    found = []
    run = Tape.run
    monkeypatch.setattr(Tape, "run", lambda self, *arguments: (found.append(self), run(self, *arguments))[1])
    return found


def generate(path, shape):
    """Log-probabilities tell more bits than tokens do. The second batch comes upon blocks that others have used."""
    sampling = [Sampling(0.0, max_tokens=limit, logprobs=True) for limit in LIMITS]
    with cluster(path, shape) as running:
        prompts = [prompt_of(length) for length in LENGTHS]
        done = running.generate(prompts, list(LIMITS), sampling) + running.generate(prompts[::-1], list(LIMITS), sampling)
        calls = [[result.collectives for result in results] for results in running.results]
        modes = {step.decode_mode for step in running.steps if step.rows}
        return [(each.token_ids, each.logprobs) for each in done], calls, modes, running.executors[0]._recorded


@pytest.mark.parametrize("name", CASES)
def test_recorded_passes_give_the_bits_of_others_and_as_many_collectives(tiny, monkeypatch, runs, name):
    path, (shape, kept, refused) = tiny(**MODEL), CASES[name]
    found, calls, modes, passes = generate(path, shape)
    assert passes is not None
    assert {key for key, each in passes._passes.items() if each is not None} == kept
    assert {key for key, each in passes._passes.items() if each is None} == refused
    assert bool(runs) == bool(kept)
    if kept:
        # Two batches, of which each number of rows is recorded once.
        assert len({id(tape) for tape in runs}) <= len(kept) * shape.tp * shape.pcp and len(runs) > 20
    runs.clear()
    monkeypatch.setattr(RecordedPasses, "of", lambda model, progress: None)
    others, other_calls, other_modes, nothing = generate(path, shape)
    assert nothing is None and not runs
    assert found == others
    assert (calls, modes) == (other_calls, other_modes)
    assert all(len(set(of_step)) == 1 for of_step in calls)


def test_replicas_that_do_not_answer_record_their_passes_too(tiny):
    """Those that answer wait for them in every layer."""
    with cluster(tiny(**MODEL), CASES["replicated"][0]) as running:
        running.generate([prompt_of(9)], 4)
        for executor in running.executors:
            passes = executor._recorded
            assert passes is not None and passes._passes.keys() == {(1, False)} and passes._passes[1, False] is not None


def churn(path, shape):
    """Requests come in the middle of others, with prompts that begin alike, into a pool that is too small for them."""
    rng = random.Random(5)
    with cluster(path, shape) as running:
        requests = []
        for _ in range(10):
            prompt = prompt_of(24)[: rng.randrange(1, 24)] + prompt_of(rng.randrange(1, 20))
            limit = rng.randrange(2, 22)
            requests.append(running.submit(prompt, Sampling(0.0, max_tokens=limit, logprobs=True)))
            for _ in range(rng.randrange(9)):
                for progress in running.step() or []:
                    running.generations[progress.handle].finish_reason = progress.finished
        done = running.finish(requests)
        assert all(executor.pool.num_blocks == shape.blocks for executor in running.executors)
        return [(each.token_ids, each.logprobs, each.num_cached_tokens, each.num_preemptions) for each in done]


@pytest.mark.parametrize("name", ["one rank", "tp 2", "dcp in tp", "split"])
def test_recorded_passes_see_blocks_come_and_go(tiny, monkeypatch, runs, name):
    path, shape = tiny(**MODEL), replace(CASES[name][0], blocks=SCARCE // CASES[name][0].dcp, max_ahead=0)
    found = churn(path, shape)
    assert len(runs) > 10
    monkeypatch.setattr(RecordedPasses, "of", lambda model, progress: None)
    assert churn(path, shape) == found
    assert sum(each[2] for each in found) and sum(each[3] for each in found)


def test_what_can_not_be_recorded_is_tried_once(tiny, monkeypatch):
    tries = []
    real = recorded.recording
    monkeypatch.setattr(recorded, "recording", lambda: (tries.append(1), real())[1])
    generate(tiny(**MODEL), CASES["local groups"][0])
    assert len(tries) == 2 * 3  # of each rank, the passes of one, two and three rows


@pytest.mark.parametrize("name", ["split", "local groups"])
def test_a_rank_tells_that_it_gets_on_in_the_middle_of_a_pass_recorded_or_not(tiny, monkeypatch, name):
    """It would be taken for stuck in a pass that takes seconds."""
    monkeypatch.setattr(tape, "BREATH_S", 0.0)
    touched = []
    monkeypatch.setattr(Worker, "touch", lambda worker: touched.append(worker))
    with cluster(tiny(**MODEL), CASES[name][0]) as running:
        running.generate([prompt_of(5)], 4)
        touched.clear()
        before = [worker.progress().commands_done for worker in running.workers]
        running.generate([prompt_of(5)], 4)
        for worker, done in zip(running.workers, before, strict=True):
            commands = worker.progress().commands_done - done
            assert commands >= 3
            # Of each command its beginning and its end, and every layer in between; the last one only releases.
            assert touched.count(worker) >= 2 * commands + LAYERS * (commands - 1)


def test_nothing_is_kept_of_a_recording_that_was_refused(tiny):
    def recorders() -> int:
        gc.collect()
        return sum(type(each) is Recorder for each in gc.get_objects())

    before = recorders()
    with cluster(tiny(**MODEL), CASES["local groups"][0]) as running:
        running.generate([prompt_of(3)], 3)
        assert running.executors[0]._recorded is not None
        assert recorders() == before


def test_a_reset_gives_the_memory_of_recordings_back(tiny):
    with cluster(tiny(**MODEL), ONE) as running:
        running.generate([prompt_of(3)], 3)
        running.everywhere(lambda executor: executor.reset())
        assert running.executors[0]._recorded is None


def test_more_rows_than_are_recorded_and_more_tokens_of_a_row_go_the_other_way(tiny, runs):
    prompts = [prompt_of(length) for length in range(3, 4 + MOST_ROWS)]
    with cluster(tiny(**MODEL), ONE) as running:
        running.generate(prompts, 3)
        passes = running.executors[0]._recorded
    assert passes is not None and not runs and all(rows <= MOST_ROWS for rows, _ in passes._passes)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_only_models_of_compiled_programs_are_recorded(tiny, dtype):
    with cluster(tiny(**MODEL), replace(ONE, dtype=dtype, kv_dtype=dtype)) as running:
        running.generate([prompt_of(3)], 3)
        assert running.executors[0]._recorded is None


def test_a_model_says_whether_it_is_compiled(tiny):
    with cluster(tiny(**MODEL), ONE) as running:
        running.generate([prompt_of(3)], 2)
        model = running.executors[0]._model
    assert isinstance(model, DecoderModel) and model.compiled


def test_after_a_reset_passes_are_recorded_anew_over_the_new_groups(tiny, runs):
    """Tapes hold addresses of groups that are gone."""
    with cluster(tiny(**MODEL), CASES["split"][0]) as running:
        first = running.generate([prompt_of(9)], 6)
        before = running.executors[0]._recorded
        running.everywhere(lambda executor: executor.reset())
        running.open_groups()
        runs.clear()
        again = running.generate([prompt_of(9)], 6, [Sampling(0.0, max_tokens=6)])
        assert running.executors[0]._recorded is not before
    assert runs and [each.token_ids for each in again] == [each.token_ids for each in first]


def test_hidden_states_of_a_tape_are_those_of_the_model(tiny):
    with cluster(tiny(**MODEL), ONE) as running:
        running.generate([prompt_of(9)], 6)
        executor = running.executors[0]
        passes, model = executor._recorded, executor._model
        assert passes is not None and isinstance(model, DecoderModel)
        kept = passes._passes[1, False]
    assert kept is not None and kept.hidden.shape == (1, 64) and torch.isfinite(kept.hidden).all()


@pytest.mark.parametrize("name", ["one rank", "split"])
def test_meanwhile_is_once_in_a_pass_and_before_a_recorded_one_runs(tiny, monkeypatch, name):
    """Whether the pass is being recorded, plays, or can't be recorded."""
    happened: list[str] = []
    with cluster(tiny(**MODEL), replace(CASES[name][0], max_ahead=0)) as running:
        (*_, executor) = running.executors
        step = executor.step
        monkeypatch.setattr(executor, "step", lambda plan, meanwhile: step(plan, lambda: happened.append("meanwhile")))
        run = Tape.run

        def play(self, given, progress, meanwhile):
            run(self, given, progress, lambda: (happened.append("play"), meanwhile()))

        monkeypatch.setattr(Tape, "run", play)
        running.generate([prompt_of(9)], 4)
    prefill_and_recorded, played = ["meanwhile"] * 2, ["play", "meanwhile"] * 2
    assert [word for word in happened if word == "meanwhile"] == ["meanwhile"] * 4
    assert happened.count("play") == 2 * len(running.executors)
    if name == "one rank":
        assert happened == [*prefill_and_recorded, *played]
