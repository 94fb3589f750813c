"""The ranks of a cluster in one process: real executors, each on a thread of its own, over `local` or `shm` groups."""

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from coordinator.plan import DecodeMode, Gather
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reorg import WORKSPACE_BYTES
from cp_wire.pb import common_pb2, rank_pb2
from model_files import open_model
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.shm import ShmBackend
from rank_server.executor import Executor
from rank_server.worker import Worker

STEP_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """A cluster to build; the fields are the flags of `kvloom up`."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 4
    block_size: int = 4
    blocks: int = 64
    max_num_seqs: int = 16
    budget: int = 64
    merge: str = "a2a"
    dtype: str = "float32"
    kv_dtype: str = "float32"
    ways: frozenset[DecodeMode] | None = None
    """What the scheduler may choose; None = all that ranks can do."""
    pcp_gather: Gather = Gather.NONE
    """What prefill rows have to gather; NONE = as the scheduler chooses."""
    always_owner: bool = False
    """Steps of a few decode rows are dealt out too."""
    workspace_bytes: int = WORKSPACE_BYTES
    pool_is_shared: bool = False
    """Pools lie where other processes of this host can read them."""
    collectives: str = "local"
    """Or shm."""
    max_ahead: int | None = None
    """Steps that the ranks may take by themselves; None = 0 and 3 in turn, over whatever shapes there are."""

    @property
    def ahead(self) -> int:
        """`max_ahead`, decided."""
        return 3 * (crc32(repr(self).encode()) % 2) if self.max_ahead is None else self.max_ahead

    def config(self) -> common_pb2.ClusterConfig:
        return common_pb2.ClusterConfig(
            tp=self.tp,
            pcp=self.pcp,
            dcp=self.dcp,
            dp=1,
            interleave=self.interleave,
            block_size=self.block_size,
            max_model_len=1 << 20,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            merge={"a2a": common_pb2.MERGE_A2A, "ag_rs": common_pb2.MERGE_AG_RS}[self.merge],
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            collectives=self.collectives,
            device="cpu",
            kv_cache_tokens_per_rank=self.blocks * self.block_size,
        )


class InprocRanks:
    """Configured, with pools full of NaN and open groups."""

    def __init__(self, model: Path, shape: Shape) -> None:
        self.shape = shape
        self.grid = Grid(tp=shape.tp, pcp=shape.pcp, dcp=shape.dcp)
        self.layout = Layout(num_shards=shape.dcp, interleave=shape.interleave, block_size=shape.block_size)
        self.files = open_model(model)
        hub = LocalHub()
        self.workers = [Worker() for _ in range(self.grid.world_size)]
        self.executors = [
            Executor(
                self.files,
                {"local": lambda: LocalBackend(hub), "shm": ShmBackend},
                worker.touch,
                workspace_bytes=shape.workspace_bytes,
            )
            for worker in self.workers
        ]
        for worker in self.workers:
            worker.start()
        self._sequence = 0
        self._bring_up()

    def close(self) -> None:
        for executor in self.executors:
            executor.close_groups()
        for worker in self.workers:
            assert worker.stop(STEP_DEADLINE_S)

    def execute(self, plan: rank_pb2.StepPlan) -> list[list[rank_pb2.StepResult]]:
        """Has every rank run the plan; by step, what those that draw told of it, and the last one's results of all ranks."""
        told: list[list[rank_pb2.StepResult]] = [[] for _ in range(plan.ahead)]

        def take(executor: Executor) -> rank_pb2.StepResult:
            own = rank_pb2.StepPlan()
            own.CopyFrom(plan)
            return executor.run(own, lambda result, _: None if result is None else told[result.index].append(result))

        last = self.everywhere(take)
        (index,) = {result.index for result in last}
        return [*told[:index], last]

    def everywhere(self, call) -> list:  # type: ignore[no-untyped-def]
        """Runs call(executor) on every rank's own thread, in rank order of the results."""
        self._sequence += 1
        futures = [
            worker.submit(self._sequence, lambda executor=executor: call(executor))
            for worker, executor in zip(self.workers, self.executors, strict=True)
        ]
        return [future.result(STEP_DEADLINE_S)[0] for future in futures]

    def _bring_up(self) -> None:
        config = self.shape.config()
        ranks = range(self.grid.world_size)
        futures = [
            self.workers[rank].submit(
                0,
                lambda rank=rank: self.executors[rank].configure(config, rank, pool_is_shared=self.shape.pool_is_shared),
            )
            for rank in ranks
        ]
        for future in futures:
            assert future.result(STEP_DEADLINE_S)[0].max_kv_blocks == self.shape.blocks
        self.everywhere(lambda executor: executor.allocate_pool(self.shape.blocks))
        self.everywhere(lambda executor: executor.pool.fill_nan(range(self.shape.blocks)))
        self.open_groups()

    def open_groups(self) -> None:
        """As every rank needs them after its pool is there, and after a reset."""
        for name, group in self.grid.named_groups().items():
            if len(group) == 1:
                continue
            first = self.workers[group[0]].submit(0, lambda n=name, g=group: self.executors[g[0]].prepare_group(n, g))
            bootstrap = first.result(STEP_DEADLINE_S)[0].bootstrap
            opened = [
                self.workers[rank].submit(
                    0, lambda r=rank, n=name, g=group, b=bootstrap: self.executors[r].open_group(n, g, b, 30.0)
                )
                for rank in group
            ]
            for future in opened:
                future.result(STEP_DEADLINE_S)
