"""A coordinator over fake ranks, and a client that writes down what it sees."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from coordinator.app import Coordinator, Options
from coordinator.detokenizer import Emission
from coordinator.stop_strings import StopStrings
from coordinator.timings import Timings
from cp_layout.model_shape import ModelShape
from cp_wire import errors
from cp_wire.channels import open_channel
from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc
from cp_wire.side_flags import MIXED
from cp_wire.sides import in_order
from tests.coordinator.fake_rank import EOS, MODEL_HASH, VOCAB, FakeRank
from tests.coordinator.room import Room

DEADLINE_S = 10.0
FAST = Timings(
    poll_interval_s=0.02,
    poll_deadline_s=1.0,
    stall_floor_s=2.0,
    step_floor_s=3.0,
    step_margin_s=0.2,
    configure_s=5.0,
    command_s=2.0,
    open_group_s=2.0,
    cause_s=1.0,
    text_s=5.0,
    encode_s=5.0,
    retry_s=0.02,
    move_again_s=0.02,
    lease_s=2.0,
    beside_s=1.0,
    pull_s=2.0,
    start_s=5.0,
    stop_s=0.2,
)
SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    vocab_size=VOCAB,
    max_position=4096,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_embeddings=True,
    dtype="float32",
)


class FakeDetokenizer:
    """Token i is the letter number i mod 26."""

    def __init__(self, stop: Sequence[str], min_tokens: int) -> None:
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._poison = "?" in stop

    def push(self, token_ids: Sequence[int]) -> Emission:
        if self._poison:
            raise RuntimeError("poison")
        self._num_tokens += len(token_ids)
        text = self._stop.feed(letters(token_ids), armed=self._num_tokens > self._min_tokens)
        return Emission(text, self._stop.stopped)

    def flush(self) -> str:
        return "" if self._stop.stopped else self._stop.flush()


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


class FakeText:
    """One token per character; "!" breaks the tokeniser, "?" in `stop` the detokenizer."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise RuntimeError("poison")
        return [ord(char) % EOS for char in text]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return self.encode("".join(f"{role}:{content}\n" for role, content in messages))

    def detokenizer(self, stop: Sequence[str] = (), min_tokens: int = 0) -> FakeDetokenizer:
        return FakeDetokenizer(stop, min_tokens)


def cluster_config(**changes: object) -> common_pb2.ClusterConfig:
    values: dict[str, object] = {
        "tp": 1, "pcp": 1, "dcp": 1, "dp": 1, "interleave": 4, "block_size": 4, "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 16, "merge": common_pb2.MERGE_A2A, "dtype": "float32", "kv_cache_dtype": "float32",
        "model_hash": MODEL_HASH, "model_name": "tiny", "collectives": "gloo", "protocol_version": PROTOCOL_VERSION,
        "pcp_gather": "auto",
        "mla_gather": "auto",
    }  # fmt: skip
    return common_pb2.ClusterConfig(**(values | changes))


@dataclass
class Heard:
    """Everything one stream said."""

    accepted: coordinator_pb2.Accepted | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    events: list[coordinator_pb2.GenerateResponse] = field(default_factory=list)
    finished: coordinator_pb2.Finished | None = None
    error: errors.KvloomError | None = None

    def hear(self, event: coordinator_pb2.GenerateResponse) -> None:
        assert self.finished is None, "an event after the terminal one"
        self.events.append(event)
        match event.WhichOneof("event"):
            case "accepted":
                assert self.accepted is None and len(self.events) == 1
                self.accepted = event.accepted
            case "tokens":
                self.token_ids += event.tokens.token_ids
                self.text += event.tokens.text
            case "finished":
                self.finished = event.finished


class Harness:
    def __init__(self, coordinator: Coordinator, address: str, ranks: list[FakeRank], channel) -> None:
        self.coordinator, self.address, self.ranks = coordinator, address, ranks
        self.inference = coordinator_pb2_grpc.InferenceServiceStub(channel)
        self.control = coordinator_pb2_grpc.ControlServiceStub(channel)
        self._health = HealthStub(channel)

    @property
    def home(self):
        """The set that outputs are computed on."""
        return self.coordinator.sets[-1]

    @property
    def scheduler(self):
        return self.home.engine.scheduler

    def call(self, prompt: Sequence[int], **fields: object):
        request = coordinator_pb2.GenerateRequest(**({"max_tokens": 8, "ignore_eos": True} | fields))
        request.tokens.ids.extend(prompt)
        return self.inference.Generate(request, timeout=DEADLINE_S)

    async def generate(self, prompt: Sequence[int], **fields: object) -> Heard:
        return await listen(self.call(prompt, **fields))

    async def status(self) -> coordinator_pb2.GetStatusResponse:
        return await self.control.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=DEADLINE_S)

    async def health(self) -> int:
        """What grpc.health.v1 answers for the process."""
        return (await self._health.Check(HealthCheckRequest(), timeout=DEADLINE_S)).status

    async def until(self, condition) -> coordinator_pb2.GetStatusResponse:
        """Reads the status stream until condition(status)."""
        async with asyncio.timeout(DEADLINE_S):
            async for update in self.control.WatchStatus(coordinator_pb2.WatchStatusRequest()):
                if condition(update.status):
                    return update.status
        raise AssertionError("the status stream ended")

    async def until_idle(self) -> None:
        """Until the ranks have forgotten every request, all blocks are free and no request's KV keeps anybody busy."""
        handover = self.coordinator.handover
        await eventually(
            lambda: (
                not any(rank.sequences or rank.kv.open for rank in self.ranks)
                and (handover is None or not handover.background._tasks)
                and all(set(home.serving.scheduler.free_blocks) == {home.pool_blocks} for home in self.coordinator.sets)
            )
        )

    async def until_active(self, count: int) -> None:
        """Until so many calls are accepted and not over."""
        await eventually(lambda: len(self.coordinator.admission.active) == count)

    async def until_queued(self, count: int) -> None:
        """Until so many requests have reached the scheduler: an accepted one may still be with the prompts' thread."""
        await eventually(lambda: self.scheduler.running + self.scheduler.waiting == count)

    async def replace(self, rank: int) -> FakeRank:
        """Starts a new process in a lost rank's seat."""
        fresh = FakeRank(rank)
        fresh.room = self.ranks[rank].room
        self.ranks[rank] = fresh
        await fresh.start(self.address)
        return fresh


async def eventually(condition) -> None:
    """Lets the event loop run until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the conditions are reads of plain state, nobody signals them
            await asyncio.sleep(0)


async def listen(call) -> Heard:
    heard = Heard()
    try:
        async for event in call:
            heard.hear(event)
    except errors.RpcError as error:
        assert heard.finished is None, "a status after the terminal event"
        heard.error = errors.from_rpc_error(error)
    return heard


@contextlib.asynccontextmanager
async def cluster(
    ranks: Sequence[FakeRank] | None = None,
    timings: Timings = FAST,
    wait: bool = True,
    options: Options | None = None,
    prefill: dict[str, object] | None = None,
    **config: object,
) -> AsyncIterator[Harness]:
    """prefill: what differs on a side of its own for prompts; None = there is none."""
    settled = cluster_config(**config)
    sides = in_order({MIXED: settled})
    if prefill is not None:
        sides = in_order({"prefill": cluster_config(**(config | prefill)), "decode": settled})
    world = sum(side.grid.world_size for side in sides)
    everyone = list(ranks) if ranks is not None else [FakeRank(rank) for rank in range(world)]
    room = Room()
    for rank in everyone:
        rank.room = room
    coordinator = Coordinator(sides, SHAPE, FakeText(), options or Options(), timings)
    async with coordinator.running() as address, open_channel(address, "prompt") as channel:
        harness = Harness(coordinator, address, everyone, channel)
        try:
            for rank in everyone:
                await rank.start(address)
            if wait:
                async with asyncio.timeout(DEADLINE_S):
                    await coordinator.ready()
            yield harness
        finally:
            for rank in harness.ranks:
                await rank.die()
