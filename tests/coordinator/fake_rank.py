"""A rank without tensors that keeps a rank's promises.

It checks every command as a real rank would (sequence, epoch, instance, request state, block tables), ends a step when the
other members of its groups have come (the ranks of one `Room`), remembers which token
lies in which slot of which member, and "samples" a hash of the history it finds in those slots. A plan that points at a wrong
slot therefore changes the tokens.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import grpc.aio

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_wire.identity import PROTOCOL_VERSION, new_instance
from cp_wire.pb import common_pb2, rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server
from tests.coordinator.fake_kv import FakeKv, KvCalls
from tests.coordinator.fake_process import FakeProcess
from tests.coordinator.fake_runs import FakeRuns
from tests.coordinator.room import PeerGone, Room

VOCAB = 96
EOS = 95
MODEL_HASH = "f00d"


def next_token(history: Sequence[int]) -> int:
    """The model: never draws the end-of-sequence id."""
    return int.from_bytes(sha256(repr(list(history)).encode()).digest()[:4], "big") % EOS


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What a request alone would produce."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class Refused(Exception):
    """A command that a rank would not run."""


@dataclass
class Held:
    """A request's state on the rank."""

    shard_offset: int
    top_logprobs: int
    tables: list[list[int]]
    stop: set[int]
    tokens: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    """Its cached tokens, where the admission names them."""


class FakeRank(FakeProcess, FakeRuns, KvCalls, rank_pb2_grpc.RankServiceServicer):
    """One process. Faults are switched on from outside; `steps` holds every plan it ran."""

    def __init__(self, rank: int, max_kv_blocks: int = 64) -> None:
        self.rank = rank
        self.max_kv_blocks = max_kv_blocks
        self.instance = new_instance()
        self.room = Room()
        self.model_hash = MODEL_HASH
        self.protocol_version = PROTOCOL_VERSION
        self.host = "one-host"
        self.steps: list[rank_pb2.StepPlan] = []
        self.step_epochs: list[int] = []
        self.commands: list[str] = []
        self.lane_closed = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_gate = asyncio.Event()
        self.frozen = False
        self.count_wrong = False
        self.drop_scores = 0
        self.fail_command: tuple[str, rank_pb2.CommandError] | None = None
        """Fails the next command of a kind."""
        self.fail_always: tuple[str, rank_pb2.CommandError] | None = None
        self.fail_rows: dict[int, str] = {}
        self.failed_row = False
        """Whether the last draw failed."""
        self.run_to_end = 0
        self.echo_change: dict[str, object] = {}
        self.sequences: dict[int, Held] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.pool: int | None = None
        self.pool_is_settled: bool | None = None
        self.load_fraction = 0.0
        self.groups: dict[str, list[int]] = {}
        self.latency_s, self.bytes_per_s = 1e-4, 1e9
        self.measured: list[int] = []
        """Payloads of the exchanges that were timed."""
        self.config: common_pb2.ClusterConfig | None = None
        self.role_first = 0
        self.index = rank
        """On its side's grid."""
        self.kv = FakeKv(self)
        self._epoch = 0
        self._running = 0
        self._last_progress = time.monotonic()
        self._server: Server | None = None

    @property
    def set_index(self) -> int:
        """DP index on its side."""
        return self._grid.coords(self.index).dp

    def draw(self, history: Sequence[int]) -> int:
        """What the model says after a history."""
        return next_token(history)

    # -- the service

    async def Execute(
        self, request_iterator: AsyncIterator[rank_pb2.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rank_pb2.ExecuteResponse]:
        try:
            expected = 0
            async for request in request_iterator:
                expected += 1
                assert request.sequence == expected, f"gap: {request.sequence} after {expected - 1}"
                async for response in self._run(request):
                    yield response
        finally:
            self.lane_closed.set()

    async def _answer(self, request: rank_pb2.ExecuteRequest) -> rank_pb2.ExecuteResponse:
        kind = request.WhichOneof("command") or ""
        self.commands.append(kind)
        self._running, self._last_progress = request.sequence, time.monotonic()
        started = time.perf_counter()
        response = rank_pb2.ExecuteResponse(sequence=request.sequence, epoch=request.epoch, instance=self.instance)
        try:
            self._check(request, kind)
            if not self.gate.is_set():
                self.at_gate.set()
                await self.gate.wait()
            getattr(self, f"_{kind}")(request, response)
            if kind == "step" and request.step.rows:
                await self._meet(request)
        except Refused as refusal:
            response.error.CopyFrom(rank_pb2.CommandError(reason="PLAN_REFUSED", message=str(refusal)))
        except PeerGone as gone:
            response.error.CopyFrom(rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message=str(gone)))
        if self.fail_command is not None and self.fail_command[0] == kind:
            response.error.CopyFrom(self.fail_command[1])
            self.fail_command = None
        if self.fail_always is not None and self.fail_always[0] == kind:
            response.error.CopyFrom(self.fail_always[1])
        response.worker_us = int(1e6 * (time.perf_counter() - started))
        self._running, self._last_progress = 0, time.monotonic()
        return response

    async def _meet(self, request: rank_pb2.ExecuteRequest) -> None:
        """Like the collectives of a real step: nobody has a result before all members of its groups have come."""
        self._last_progress = time.monotonic()
        for name, ranks in self.groups.items():
            await self.room.meet(f"step {request.step.ticket} of {name}", self.rank, ranks, request.step.timeout_ms / 1000)

    def _check(self, request: rank_pb2.ExecuteRequest, kind: str) -> None:
        if request.instance != self.instance:
            raise Refused(f"command for {request.instance}, this is {self.instance}")
        if request.epoch < self._epoch or (request.epoch > self._epoch and kind not in ("reset", "configure")):
            raise Refused(f"{kind} of epoch {request.epoch} at epoch {self._epoch}")
        self._epoch = request.epoch

    # -- commands

    def _configure(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        if self.config is not None:
            raise Refused("configured twice")
        self.config = request.configure.config
        self.pool_is_settled = request.configure.pool_is_settled
        self.role_first = request.configure.first_rank
        self.index = self.rank - self.role_first
        self._grid = Grid(self.config.tp, self.config.pcp, self.config.dcp, self.config.dp)
        self._layout = Layout(self.config.dcp, self.config.interleave, self.config.block_size)
        response.configured.config.CopyFrom(self.config)
        for name, value in self.echo_change.items():
            setattr(response.configured.config, name, value)
        response.configured.max_kv_blocks = self.max_kv_blocks

    def _allocate_pool(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        if self.pool is not None or self.config is None:
            raise Refused("allocated twice, or before it was configured")
        self.pool = request.allocate_pool.num_blocks
        response.pool_allocated.num_blocks = self.pool

    def _prepare_group(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        if request.prepare_group.ranks[0] != self.rank:
            raise Refused("only index 0 prepares")
        response.group_prepared.bootstrap = f"{request.prepare_group.group}@{self._epoch}".encode()

    def _open_group(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        opened = request.open_group
        if opened.group in self.groups or opened.bootstrap != f"{opened.group}@{self._epoch}".encode():
            raise Refused(f"{opened.group} is open or has a strange bootstrap {opened.bootstrap!r}")
        self.groups[opened.group] = list(opened.ranks)
        response.group_opened.SetInParent()

    def _measure_group(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        asked = request.measure_group
        if asked.group not in self.groups:
            raise Refused(f"{asked.group} is not open")
        self.measured.append(asked.payload_bytes)
        received = (len(self.groups[asked.group]) - 1) * asked.payload_bytes
        response.group_measured.seconds = (self.latency_s + received / self.bytes_per_s) * (1 + self.rank / 8)

    def _reset(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        self.groups.clear()
        self.sequences.clear()
        self.memory.clear()
        self.kv.reset()
        response.reset_done.SetInParent()

    def _step(self, request: rank_pb2.ExecuteRequest, response: rank_pb2.ExecuteResponse) -> None:
        plan = request.step
        named = self._grid.named_groups()
        wanted = {name for name, ranks in named.items() if len(ranks) > 1 and self.index in ranks}
        if set(self.groups) != wanted:
            raise Refused(f"groups {sorted(self.groups)} are open, {sorted(wanted)} are needed")
        for handle in plan.released:
            if self.sequences.pop(handle, None) is None:
                raise Refused(f"released {handle}, which is unknown")
        cached = {}
        for admitted in plan.admitted:
            if admitted.handle in self.sequences:
                raise Refused(f"admitted {admitted.handle} twice")
            tables: list[list[int]] = [[] for _ in range(self._layout.num_shards)]
            self.sequences[admitted.handle] = Held(
                admitted.shard_offset, admitted.sampling.top_logprobs, tables, set(admitted.sampling.stop_token_ids)
            )
            self.sequences[admitted.handle].named = list(admitted.cached_token_ids)
            cached[admitted.handle] = admitted.num_cached_tokens
        for row in plan.rows:
            self._row(row, cached.get(row.handle, 0), response.step)
        response.step.ticket = plan.ticket
        member = self._grid.dcp_member(self.index)
        entries = sum(len(held.tables[member]) for held in self.sequences.values())
        response.step.blocks_in_use = entries + self.count_wrong
        self.steps.append(plan)
        self.step_epochs.append(request.epoch)

    def _row(self, row: rank_pb2.StepRow, cached: int, result: rank_pb2.StepResult) -> None:
        sequence = self.sequences.get(row.handle)
        if sequence is None:
            raise Refused(f"row of unknown request {row.handle}")
        blocks = iter(row.new_block_ids)
        for table, count in zip(sequence.tables, row.new_block_counts, strict=bool(row.new_block_counts)):
            table.extend(next(blocks) for _ in range(count))
        for position in range(len(sequence.tokens), cached):
            sequence.tokens.append(self.memory[self._slot(sequence, position)])
        if sequence.named and sequence.named != sequence.tokens[: len(sequence.named)]:
            raise Refused(f"other cached tokens of {row.handle} are named than are here")
        if row.start != len(sequence.tokens):
            raise Refused(f"row of {row.handle} starts at {row.start}, {len(sequence.tokens)} tokens are here")
        for token in row.token_ids:
            slot = self._slot(sequence, len(sequence.tokens))
            self.kv.check_write(slot)
            self.memory[slot] = token
            sequence.tokens.append(token)
        place = self._grid.coords(self.index)
        if row.score_token_ids and place.pcp == place.tp == 0:
            positions = [common_pb2.PositionLogprobs(sampled=-float(token)) for token in row.score_token_ids]
            kept = positions[self.drop_scores :]
            result.scores.add(handle=row.handle, start=row.score_start + self.drop_scores, positions=kept)
        if row.sample and place.pcp == place.tp == 0:
            drawn = result.sampled.add(handle=row.handle, token_id=self.draw(sequence.tokens))
            drawn.error = self.fail_rows.pop(row.handle, "")
            self.failed_row = drawn.error != ""
            if sequence.top_logprobs:
                drawn.logprobs.sampled = -0.5

    def _slot(self, sequence: Held, position: int) -> tuple[int, int, int]:
        layout = self._layout
        member = layout.member_of(layout.owner(position), sequence.shard_offset)
        column = layout.block_column(position)
        if column >= len(sequence.tables[member]):
            raise Refused(f"no block for position {position} on member {member}")
        block = sequence.tables[member][column]
        assert self.pool is not None
        if not 0 <= block < self.pool:
            raise Refused(f"block {block} is outside a pool of {self.pool}")
        return member, block, layout.block_offset(position)
