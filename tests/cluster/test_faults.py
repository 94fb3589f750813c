"""Messages between real processes that are damaged, lost, repeated, out of order or of another time."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.processes import kvloom_up
from tests.kv_transfer.faults import FILE
from tests.tiny_models import build_tiny_llama, greedy_reference

pytestmark = [pytest.mark.cluster, pytest.mark.sweep]

FAULTS = 1000
KINDS = {"flip", "drop", "duplicate", "truncate", "wrong_index", "lying_index", "stale", "reorder"}
ROUNDS = 500
"""More than enough of them. Every request of a round has the same salt, so that it may hit what others of the round left."""
ASK_AGAIN = 4
"""Every so many rounds all prompts come a second time: what the first time left in the prefix caches is put to use."""
NEW_TOKENS = 6
DEADLINE_S = 60.0
ROOT = Path(__file__).parent.parent.parent
# Read by every Python process at its start; only ranks make faults.
SITE = """
import sys
if "rank_server" in sys.orig_argv:
    from kv_transfer import service
    from tests.kv_transfer.faults import FaultyProcess
    service.KvTransferServicer = FaultyProcess
"""


def test_a_thousand_faults_between_processes_change_no_token_and_no_cached_block_and_leak_none(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    noted = tmp_path / "faults"
    noted.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    monkeypatch.setenv(FILE, str(noted))
    model = build_tiny_llama(tmp_path / "model", heads=8, kv_heads=2)
    rng = random.Random(3)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (40, 100, 150, 200)]
    references = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    flags = ["--prefill-ranks", "1", "--decode-ranks", "1", "--block-size", "4", "--kv-cache-tokens-per-rank", "8192"]
    with (
        kvloom_up(str(model), *flags, "--max-num-batched-tokens", "32", log=tmp_path / "stderr") as running,
        ThreadPoolExecutor(len(prompts)) as clients,
    ):

        def ask(salt: str) -> list[int]:
            """All prompts at once: how many tokens of each were cached."""
            calls = [
                clients.submit(
                    running.client.complete,
                    token_ids=prompt,
                    max_tokens=NEW_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                    cache_salt=salt,
                )
                for prompt in prompts
            ]
            answers = [call.result(DEADLINE_S) for call in calls]
            assert [list(answer.token_ids) for answer in answers] == references
            return [answer.usage.cached_tokens for answer in answers]

        asked = 0
        for number in range(ROUNDS):
            assert ask(f"{number}") == [0] * len(prompts)
            asked += len(prompts)
            if number % ASK_AGAIN == 0:
                assert all(ask(f"{number}"))
                asked += len(prompts)
            faults = Counter(noted.read_text().split())
            if faults.total() >= FAULTS and faults.keys() >= KINDS:
                break
        assert faults.total() >= FAULTS and faults.keys() == KINDS
        transfers = running.status().transfers
        assert transfers.retries > FAULTS / 2 and transfers.shared_bytes == 0
        recomputed = sum(each.requests for each in transfers.recomputed)
        assert transfers.requests + recomputed == asked
        running.wait_for(running.all_blocks_free, 30, "all blocks free")
