"""From a request on the wire to one in a queue: everything is checked before anything is reserved."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from coordinator.limits import Limits, RequestRefused
from coordinator.plan import Sampling
from coordinator.rank_set import RankSet
from coordinator.request import Request
from coordinator.scheduler_types import QueueFull
from coordinator.stream import RequestStream
from coordinator.tasks import Changes
from coordinator.text_errors import TextRefused
from coordinator.text_rows import LiveRequest
from coordinator.text_worker import Text, TextWorker
from cp_wire.errors import Duplicate, Exhausted, Internal, InvalidRequest, Unavailable, Unknown
from cp_wire.logs import get_logger
from cp_wire.pb import coordinator_pb2

MAX_ID_CHARS = 256
MAX_CHARS_PER_TOKEN = 256
"""Text longer than this many characters per token of max_model_len is refused untokenised."""

RETRY_AFTER_S = 1.0

OPTIONAL = ("max_tokens", "temperature", "top_p", "top_k", "min_tokens", "top_logprobs")
"""Fields whose absence means a default."""

log = get_logger("coordinator.admission")


@dataclass(slots=True, eq=False)
class Accepted:
    """An active request: from the moment its id is taken until its call ends."""

    request_id: str
    stream: RequestStream = field(default_factory=RequestStream)
    live: LiveRequest | None = None
    home: RankSet | None = None


class SeedSource:
    """Seeds for requests that bring none: unpredictable, or a fixed sequence when the operator gave a seed."""

    def __init__(self, seed: int | None) -> None:
        self._bits: Callable[[int], int] = secrets.randbits if seed is None else Random(seed).getrandbits

    def draw(self) -> int:
        """64 bits."""
        return self._bits(64)


class Admission:
    """The table of active requests, over all sets."""

    def __init__(
        self,
        sets: Sequence[RankSet],
        limits: Callable[[RankSet], Limits],
        text: TextWorker,
        model_name: str,
        seeds: SeedSource,
        handles: Iterator[int],
    ) -> None:
        self._sets = sets
        self._limits = limits
        self._text = text
        self._model_name = model_name
        self._seeds = seeds
        self._handles = handles
        self._active: dict[str, Accepted] = {}
        self.closed = False
        self.changes = Changes()

    @property
    def active(self) -> Mapping[str, Accepted]:
        """Active requests by id."""
        return self._active

    async def admit(self, wire: coordinator_pb2.GenerateRequest) -> Accepted:
        """Queues a request; raises the KvloomError it is refused with. `release` must follow, however its call ends."""
        self._pick()
        accepted = self._take_id(wire)
        try:
            await self._queue(wire, accepted)
        except BaseException:
            self.release(accepted)
            raise
        return accepted

    def abort(self, request_id: str) -> None:
        """Ends a request's stream with reason "abort"; `Unknown` when there is no such request."""
        accepted = self._active.get(request_id)
        if accepted is None:
            raise Unknown(f"no active request has the id {request_id[:MAX_ID_CHARS]}")
        accepted.stream.finish("abort")
        self._withdraw(accepted)

    def end_all(self, error: Unavailable) -> int:
        """Fails every active request; returns how many."""
        ended = [accepted for accepted in self._active.values() if not accepted.stream.ended]
        for accepted in ended:
            accepted.stream.fail(error)
            self._withdraw(accepted)
        return len(ended)

    def release(self, accepted: Accepted) -> None:
        """The call is over: frees the id, and the blocks if the request still has some."""
        self._withdraw(accepted)
        del self._active[accepted.request_id]
        self.changes.announce()

    def _withdraw(self, accepted: Accepted) -> None:
        if accepted.live is not None and accepted.home is not None and accepted.home.engine is not None:
            accepted.home.engine.abort(accepted.live.request.handle)

    def _take_id(self, wire: coordinator_pb2.GenerateRequest) -> Accepted:
        request_id = wire.request_id or secrets.token_hex(8)
        if len(request_id) > MAX_ID_CHARS:
            raise InvalidRequest("request_id", f"{len(request_id)} characters", f"it must have at most {MAX_ID_CHARS}")
        if request_id in self._active:
            raise Duplicate(f"a request with the id {request_id} is active")
        accepted = self._active[request_id] = Accepted(request_id)
        return accepted

    async def _queue(self, wire: coordinator_pb2.GenerateRequest, accepted: Accepted) -> None:
        if wire.model and wire.model != self._model_name:
            raise Unknown(f"the model {wire.model[:MAX_ID_CHARS]} is not served, {self._model_name} is")
        try:
            prompt = await self._tokens(wire)
            # The set may have broken while the text was tokenised.
            home = self._pick()
            sampling = self._sampling(wire, prompt, self._limits(home))
        except (RequestRefused, TextRefused) as refusal:
            raise InvalidRequest(refusal.field, refusal.value, f"it must be {refusal.limit}") from None
        accepted.home, engine = home, home.engine
        accepted.live = LiveRequest(
            Request(
                handle=next(self._handles),
                request_id=accepted.request_id,
                prompt=prompt,
                sampling=sampling,
                salt=wire.cache_salt.encode(),
            ),
            self._text.text.detokenizer(wire.stop),
            accepted.stream,
        )
        if accepted.stream.ended or engine is None:
            return
        try:
            engine.submit(accepted.live)
        except QueueFull as full:
            raise Exhausted(str(full), retry_after_s=RETRY_AFTER_S) from None

    def _pick(self) -> RankSet:
        if self.closed:
            raise Unavailable("the server is draining", retry_after_s=RETRY_AFTER_S)
        ready = [home for home in self._sets if home.ready]
        if not ready:
            raise Unavailable("no rank set is ready", retry_after_s=RETRY_AFTER_S)
        return min(ready, key=lambda home: home.engine.load if home.engine is not None else 0)

    async def _tokens(self, wire: coordinator_pb2.GenerateRequest) -> list[int]:
        kind = wire.WhichOneof("prompt")
        if kind == "tokens":
            return list(wire.tokens.ids)
        if kind is None:
            raise InvalidRequest("prompt", "", "it must be text, tokens or chat")
        messages = [(message.role, message.content) for message in wire.chat.messages]
        longest = MAX_CHARS_PER_TOKEN * max(self._limits(home).max_model_len for home in self._sets if home.ready)
        size = len(wire.text) if kind == "text" else sum(len(role) + len(content) for role, content in messages)
        if size > longest:
            raise InvalidRequest(kind, f"{size} characters", f"it must have at most {longest}")

        def encode(text: Text) -> list[int]:
            return text.encode(wire.text) if kind == "text" else text.encode_chat(messages)

        try:
            return await self._text.encode(encode)
        except TextRefused:
            raise
        except Exception as error:
            log.error("tokenisation failed", exc=error)
            raise Internal(f"tokenisation failed ({type(error).__name__})") from error

    def _sampling(self, wire: coordinator_pb2.GenerateRequest, prompt: Sequence[int], limits: Limits) -> Sampling:
        given = {spec.name: value for spec, value in wire.ListFields() if spec.name in OPTIONAL}
        return limits.validate(
            prompt,
            seed=wire.seed if wire.HasField("seed") else self._seeds.draw(),
            **given,
            stop=wire.stop,
            stop_token_ids=wire.stop_token_ids,
            ignore_eos=wire.ignore_eos,
        )
