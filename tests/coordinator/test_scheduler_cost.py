"""What a step must not cost: hashing of prompts, looks at requests that wait."""

import pytest

from cp_layout.blocks import BlockHasher
from cp_layout.interleave import Layout
from tests.coordinator.oracle import Cluster

ONE = Layout(1, 4, 4)
FOUR = Layout(4, 4, 4)


@pytest.mark.parametrize("layout", [ONE, FOUR, Layout(4, 1, 4)], ids=str)
def test_a_request_that_brings_its_digests_is_scheduled_without_hashing(layout, monkeypatch):
    """Output is hashed as it fills units; each prompt, hit or miss, never again."""
    cluster = Cluster(layout, 100)
    prompt = list(range(50))
    hasher = BlockHasher(layout, b"identity", b"")
    hashed = []
    extend = BlockHasher.extend
    monkeypatch.setattr(BlockHasher, "extend", lambda self, prev, tokens: hashed.append(tokens) or extend(self, prev, tokens))
    for _ in range(2):
        request = cluster.add(prompt, 5, digests=hasher.hashes(prompt))
        hashed.clear()
        cluster.step()
        assert not hashed
        cluster.drain()
        cluster.check_output(request)
    assert request.num_cached_tokens > 0
    late = cluster.add(prompt, 20)
    cluster.step()
    assert hashed
    cluster.drain()
    assert late.digests == hasher.hashes([*prompt, *late.output])[: len(late.digests)]
    assert len(late.digests) == (len(prompt) + 19) // hasher.unit_tokens


def test_blocks_in_tables_are_counted_not_searched_for():
    """Requests that wait cost a step nothing."""
    cluster = Cluster(FOUR, 100, max_num_seqs=2, max_waiting=1000)
    for _ in range(500):
        cluster.add([1, 2, 3], 5)
    cluster.step()
    looked_at = []

    class Watched(dict):
        def __getitem__(self, key):
            looked_at.append(key)
            return super().__getitem__(key)

        def values(self):
            looked_at.extend(self)
            return super().values()

    cluster.scheduler._kv._sequences = Watched(cluster.scheduler._kv._sequences)
    cluster.step()
    assert sum(cluster.scheduler.table_blocks) > 0
    assert len(set(looked_at)) <= 2
