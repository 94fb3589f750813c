"""Executors over a tiny model for tests: each counts its progress reports, groups are threads of the test's process."""

from functools import partial

from cp_wire.pb import common_pb2, rank_pb2
from rank_server.collectives.gloo import GlooBackend
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.executor import Executor
from tests.inproc import Shape
from tests.rank_server.threads import run_ranks

B = 4
BLOCKS = 16
DEADLINE_S = 20.0


class Rank:
    """An executor that counts its progress reports."""

    def __init__(self, files, hub=None, ranks_on_host=1, device="auto"):
        self.reports = 0
        backends = {"local": lambda: LocalBackend(hub or LocalHub()), "public": partial(GlooBackend, "0.0.0.0")}
        self.executor = Executor(files, backends, self._report, ranks_on_host, device)

    def _report(self):
        self.reports += 1


def config(**changes):
    settled = Shape(block_size=B, blocks=BLOCKS).config()
    for name, value in changes.items():
        setattr(settled, name, value)
    return settled


def serving(files, rank=0, hub=None, **changes):
    """A configured rank with its pool."""
    ready = Rank(files, hub)
    ready.executor.configure(config(**changes), rank)
    ready.executor.allocate_pool(BLOCKS)
    return ready


def plan(*rows, admitted=(), released=(), timeout_ms=20_000, **changes):
    fields = {"decode_mode": common_pb2.DECODE_MODE_REPLICATED, "gather": common_pb2.GATHER_NONE, "ticket": 7} | changes
    entries = [rank_pb2.AdmittedRequest(handle=handle) for handle in admitted]
    return rank_pb2.StepPlan(timeout_ms=timeout_ms, admitted=entries, released=released, rows=rows, **fields)


def row(handle, start, tokens, blocks=(), output_index=0):
    counts = [len(blocks)] if blocks else []
    return rank_pb2.StepRow(
        handle=handle,
        start=start,
        token_ids=tokens,
        new_block_ids=blocks,
        new_block_counts=counts,
        sample=True,
        output_index=output_index,
    )


def open_all(executors, groups):
    """Opens groups on all their members at once."""
    for name, ranks in groups.items():
        bootstrap = executors[ranks[0]].prepare_group(name, ranks).bootstrap
        run_ranks(len(ranks), lambda i, n=name, r=ranks, b=bootstrap: executors[r[i]].open_group(n, r, b, DEADLINE_S))
