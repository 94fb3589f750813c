"""Timing the exchanges of a group."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.link_timing import MAX_PAYLOAD_BYTES, MAX_REPEATS, time_all_gather
from rank_server.sequences import PlanRefused

CPU = torch.device("cpu")


def test_all_members_exchange_as_often_as_asked_and_one_more():
    backends = [LocalBackend(hub) for hub in [LocalHub()] * 3]
    bootstrap = backends[0].prepare("g", range(3))
    touched = []
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: backends[rank].open("g", range(3), rank, bootstrap, 10.0), range(3)))
        seconds = list(pool.map(lambda group: time_all_gather(group, 4096, 5, CPU, lambda: touched.append(1)), groups))
    assert [group.calls for group in groups] == [6, 6, 6]
    assert len(touched) == 18
    assert all(0 < each < 10 for each in seconds)


@pytest.mark.parametrize(
    ("payload_bytes", "repeats"), [(0, 1), (4, 0), (6, 1), (MAX_PAYLOAD_BYTES + 4, 1), (4, MAX_REPEATS + 1)]
)
def test_sizes_beyond_reason_are_refused_before_anybody_waits(payload_bytes, repeats):
    group = LocalBackend(LocalHub())
    opened = group.open("g", [0], 0, group.prepare("g", [0]), 1.0)
    with pytest.raises(PlanRefused, match=f"{repeats} exchanges of {payload_bytes} bytes"):
        time_all_gather(opened, payload_bytes, repeats, CPU, lambda: None)
    assert opened.calls == 0
