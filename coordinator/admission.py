"""From a request on the wire to one in a queue: everything is checked before anything is reserved."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.limits import Limits
from coordinator.prepare import Prepared, is_long, prepare
from coordinator.rank_set import RankSet
from coordinator.request import Request
from coordinator.scheduler_types import QueueFull
from coordinator.seeds import SeedSource
from coordinator.stream import RequestStream
from coordinator.tasks import Changes
from coordinator.text_rows import LiveRequest
from coordinator.text_worker import TextWorker
from cp_layout.blocks import BlockHasher
from cp_wire.errors import Duplicate, Exhausted, InvalidRequest, Unavailable, Unknown
from cp_wire.pb import common_pb2, coordinator_pb2

MAX_ID_CHARS = 256
RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class Accepted:
    """An active request: from the moment its id is taken until its call ends."""

    request_id: str
    stream: RequestStream = field(default_factory=RequestStream)
    lives: tuple[LiveRequest, ...] = ()
    """One per completion, once they are made; they share the prompt and the stream."""
    home: RankSet | None = None
    """Chosen before the prompt is prepared."""


class Admission:
    """The table of active requests, over all sets.

    sets: those that requests can belong to. submit: queues the completions of a prompt in a set, or raises QueueFull. hashers:
    name a tenant's cached blocks, by salt: the set's own first, then that of the set for its prompts, if it is another.
    """

    def __init__(
        self,
        sets: Sequence[RankSet],
        submit: Callable[[RankSet, Sequence[LiveRequest]], None],
        limits: Callable[[RankSet], Limits],
        hashers: Callable[[bytes], Sequence[BlockHasher]],
        text: TextWorker,
        model_name: str,
        seeds: SeedSource,
        handles: Iterator[int],
    ) -> None:
        self._sets = sets
        self._submit = submit
        self._limits = limits
        self._hashers = hashers
        self._text = text
        self._model_name = model_name
        self._seeds = seeds
        self._handles = handles
        self._active: dict[str, Accepted] = {}
        self.closed = False
        self.complete = True
        """Whether all ranks that a request may need have served; until then nothing is admitted."""
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
        try:
            self._withdraw(accepted)
        finally:
            del self._active[accepted.request_id]
            self.changes.announce()

    def _withdraw(self, accepted: Accepted) -> None:
        if accepted.home is not None and accepted.home.engine is not None:
            for live in accepted.lives:
                accepted.home.engine.abort(live.request.handle)

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
        if len(wire.cache_salt) > MAX_ID_CHARS:
            raise InvalidRequest("cache_salt", f"{len(wire.cache_salt)} characters", f"it must have at most {MAX_ID_CHARS}")
        accepted.home = home = self._pick()
        seed = wire.seed if wire.HasField("seed") else self._seeds.draw()
        limits = self._limits(home)
        hashers = self._hashers(wire.cache_salt.encode())
        prepared = await self._text.encode(lambda text: prepare(wire, text, limits, seed, hashers), long=is_long(wire))
        self._check_open()
        if not home.ready:
            raise Unavailable("the request's ranks were lost while it was tokenised", retry_after_s=RETRY_AFTER_S)
        accepted.lives = self._completions(accepted, prepared, wire)
        if accepted.stream.ended:
            return
        if prepared.samplings[0].prompt_logprobs is not None:
            accepted.stream.put_prompt(0, [common_pb2.PositionLogprobs()])
        try:
            self._submit(home, accepted.lives)
        except QueueFull as full:
            raise Exhausted(str(full), retry_after_s=RETRY_AFTER_S) from None

    def _completions(
        self, accepted: Accepted, prepared: Prepared, wire: coordinator_pb2.GenerateRequest
    ) -> tuple[LiveRequest, ...]:
        """The first one computes the prompt; the others follow it."""
        accepted.stream.expect(len(prepared.samplings))
        lives: list[LiveRequest] = []
        for index, sampling in enumerate(prepared.samplings):
            request = Request(
                handle=next(self._handles),
                request_id=accepted.request_id,
                prompt=prepared.prompt,
                digests=list(prepared.digests[0]),
                sampling=sampling,
                salt=wire.cache_salt.encode(),
                leader=lives[0].request if lives else None,
            )
            detokenizer = self._text.text.detokenizer(wire.stop, sampling.min_tokens)
            digests = list(prepared.digests[-1]) if len(prepared.digests) > 1 else []
            lives.append(LiveRequest(request, detokenizer, accepted.stream, index, prompt_digests=digests))
        return tuple(lives)

    def _check_open(self) -> None:
        if self.closed:
            raise Unavailable("the server is draining", retry_after_s=RETRY_AFTER_S)
        if not self.complete:
            raise Unavailable("some of the ranks have not served yet", retry_after_s=RETRY_AFTER_S)

    def _pick(self) -> RankSet:
        self._check_open()
        ready = [home for home in self._sets if home.ready]
        if not ready:
            raise Unavailable("no rank set is ready", retry_after_s=RETRY_AFTER_S)
        return min(ready, key=self._load)

    def _load(self, home: RankSet) -> int:
        """Requests of a set, those whose prompt is still being prepared for it included."""
        queued = home.engine.load if home.engine is not None else 0
        return queued + sum(accepted.home is home and not accepted.lives for accepted in self._active.values())
