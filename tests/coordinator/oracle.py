"""Ranks that compute nothing but check everything: the scheduler's steps are run against a memory of token histories.

The KV of a position is a hash of all tokens up to it, so a block holds the right KV only if every token before it, back to
the first, is right. The "model" draws the next token from that hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from coordinator.choice import Replicas
from coordinator.plan import DecodeMode, Sampling, ScheduledStep
from coordinator.request import Request, State
from coordinator.scheduler import Progress, Scheduler, SchedulerConfig
from cp_layout.interleave import Layout

VOCAB = 50


def extend(kv: int, token: int) -> int:
    """KV of the position that follows `kv` and holds `token`."""
    return int.from_bytes(blake2b(f"{kv},{token}".encode(), digest_size=8).digest(), "little")


def draw(kv: int, sampling: Sampling, ban_stop: bool) -> int:
    """The model: next token after a history."""
    token = kv % VOCAB
    while ban_stop and token in sampling.stop_token_ids:
        token = (token + 1) % VOCAB
    return token


def run_alone(prompt: list[int], sampling: Sampling) -> tuple[list[int], str]:
    """Output and finish reason of a request that has the model for itself."""
    kv, output = 0, []
    for token in prompt:
        kv = extend(kv, token)
    while True:
        output.append(draw(kv, sampling, len(output) < sampling.min_tokens))
        if output[-1] in sampling.stop_token_ids:
            return output, "stop"
        if len(output) == sampling.max_tokens:
            return output, "length"
        kv = extend(kv, output[-1])


@dataclass
class _Sequence:
    sampling: Sampling
    offset: int
    num_computed: int
    tables: list[list[int]]
    num_cached: int
    owner: int
    num_prefill_tokens: int
    fresh: bool = True
    num_given: int = 0
    """Tokens that there are blocks for."""
    drawn: int = -1
    """Its last draw."""
    beyond: list[int] = field(default_factory=list)
    """Tokens drawn in a run after the request had ended: nobody else keeps them."""


class FakeRanks:
    """All members of one scheduling set. Every rule a rank relies on is an assertion."""

    def __init__(self, layout: Layout, blocks_per_member: int, replicas: Replicas) -> None:
        self.layout = layout
        self.blocks_per_member = blocks_per_member
        self.replicas = replicas
        self.copies = range(replicas.pcp if replicas.dcp == 1 else 1)
        """Pools that hold the same block ids of a member, one per replica when the KV is not cut over them."""
        self.sequences: dict[int, _Sequence] = {}
        self.memory: dict[tuple[int, int, int], list[int | None]] = {}
        """By copy, member and block."""
        self.scored: dict[int, int] = {}
        """Per handle, the first prompt position that is still to be scored."""

    def reset(self) -> None:
        """A new epoch: no sequence, and no content that anybody may rely on."""
        self.sequences.clear()
        self.memory.clear()

    def run(self, step: ScheduledStep, requests: dict[int, Request]) -> dict[int, int]:
        """Checks and executes the step; returns the drawn tokens by handle."""
        for handle in step.released:
            assert handle in self.sequences, "released but not known"
            del self.sequences[handle]
        for admission in step.admitted:
            assert admission.handle not in self.sequences, "admitted twice"
            assert 0 <= admission.shard_offset < self.layout.num_shards
            tables: list[list[int]] = [[] for _ in range(self.layout.num_shards)]
            cached = admission.num_cached_tokens
            request = requests[admission.handle]
            assert admission.num_prompt_tokens == len(request.prompt)
            assert admission.cached_token_ids == (request.known(0, cached) if request.sampling.counts_tokens else ())
            assert admission.num_prefill_tokens == request.num_known > cached
            running = [sequence.owner for sequence in self.sequences.values()]
            assert admission.owner == min(range(self.replicas.pcp), key=running.count), "somebody else has fewer requests"
            self.sequences[admission.handle] = _Sequence(
                admission.sampling,
                admission.shard_offset,
                cached,
                tables,
                cached,
                admission.owner,
                admission.num_prefill_tokens,
            )
        handles = [row.handle for row in step.rows]
        assert len(set(handles)) == len(handles), "two rows of one request"
        assert {admission.handle for admission in step.admitted} <= set(handles), "admitted without a row"
        assert step.decode_mode in self.replicas.ways
        mode, ahead = step.decode_mode, step.ahead
        return dict(each for row in step.rows for each in self._run_row(row, requests[row.handle], mode, ahead))

    def held(self, member: int) -> list[int]:
        """Entries of all block tables of the member."""
        return [block for sequence in self.sequences.values() for block in sequence.tables[member]]

    def _run_row(self, row, request: Request, mode: DecodeMode, ahead: int):
        sequence = self.sequences[row.handle]
        history = request.prompt + request.output
        end = row.start + len(row.token_ids)
        if request.state is State.ENDING and end > len(history):
            assert row.token_ids == (sequence.drawn,), "a run goes on with another token than it drew"
            sequence.beyond.append(sequence.drawn)
            history += sequence.beyond
        assert row.token_ids, "an empty row"
        assert row.start == sequence.num_computed, "a gap in the sequence"
        assert list(row.token_ids) == history[row.start : end], "other tokens than the request's"
        assert row.sample == (end == len(history))
        index = len(history) - len(request.prompt)
        assert row.output_index == index
        assert row.ban_stop == (index < sequence.sampling.min_tokens)
        self._score(row, request)
        self._append_blocks(sequence, row.new_blocks)
        sequence.num_given = max(sequence.num_given, end + ahead)
        for member, table in enumerate(sequence.tables):
            shard = self.layout.shard_on(member, sequence.offset)
            assert len(table) == self.layout.blocks_needed(shard, sequence.num_given), "a block too many or too few"
        decodes = row.start >= sequence.num_prefill_tokens
        alone = mode is DecodeMode.OWNER and decodes and len(self.copies) > 1
        assert not (mode is DecodeMode.SPLIT and not decodes), "a prefill row is split"
        kv = 0
        for position, token in enumerate(history[:end]):
            kv = extend(kv, token)
            member, block, offset = self._slot(sequence, position)
            for copy in [sequence.owner] if alone else self.copies:
                content = self.memory[copy, member, block]
                if position < row.start:
                    assert content[offset] == kv, f"position {position} of request {row.handle} does not hold its tokens"
                else:
                    assert self.held(member).count(block) == 1, "a shared block is written"
                    assert content[offset] is None, "a slot is written twice"
                    content[offset] = kv
        sequence.num_computed = end
        sequence.drawn = draw(kv, sequence.sampling, row.ban_stop)
        return [(row.handle, sequence.drawn)] if row.sample else []

    def _score(self, row, request: Request) -> None:
        """Every position once, in order, and all of them before the first draw."""
        first, scored = row.score_start, row.score_token_ids
        if scored:
            assert request.sampling.prompt_logprobs is not None
            assert row.start < first == self.scored.get(row.handle, 1)
            assert first + len(scored) <= row.start + len(row.token_ids) + 1, "scored by tokens that are not in the row"
            assert scored == tuple(request.prompt[first : first + len(scored)])
            self.scored[row.handle] = first + len(scored)
        if row.sample and request.sampling.prompt_logprobs is not None:
            assert self.scored.get(row.handle, 1) == len(request.prompt)

    def _append_blocks(self, sequence: _Sequence, new_blocks: tuple[tuple[int, ...], ...]) -> None:
        assert new_blocks == () or (len(new_blocks) == self.layout.num_shards and any(new_blocks))
        for member, blocks in enumerate(new_blocks):
            shard = self.layout.shard_on(member, sequence.offset)
            cached = self.layout.blocks_needed(shard, sequence.num_cached) if sequence.fresh else 0
            for index, block in enumerate(blocks):
                assert 0 <= block < self.blocks_per_member
                if index >= cached:
                    assert block not in self.held(member), "a block in use is handed out"
                    self.memory.update({(copy, member, block): [None] * self.layout.block_size for copy in self.copies})
                sequence.tables[member].append(block)
        sequence.fresh = False

    def _slot(self, sequence: _Sequence, position: int) -> tuple[int, int, int]:
        member = self.layout.member_of(self.layout.owner(position), sequence.offset)
        return member, sequence.tables[member][self.layout.block_column(position)], self.layout.block_offset(position)


@dataclass
class Cluster:
    """A scheduler over fake ranks, with everything that came out of it."""

    layout: Layout
    blocks_per_member: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_waiting: int = 1000
    max_ahead: int = 0
    replicas: Replicas = Replicas()  # noqa: RUF009 - frozen
    requests: dict[int, Request] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    steps: list[ScheduledStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens, self.max_waiting, self.max_ahead)
        self.scheduler = Scheduler(config, self.layout, self.blocks_per_member, b"identity", self.replicas)
        self.ranks = FakeRanks(self.layout, self.blocks_per_member, self.replicas)
        self.sampled: dict[int, int] = {}

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 1,
        *,
        salt: bytes = b"",
        digests: Sequence[bytes] = (),
        leader: Request | None = None,
        **sampling,
    ) -> Request:
        """Queues a request with the next handle."""
        handle = len(self.requests) + 1
        wanted = Sampling(max_tokens=max_tokens, **sampling)
        request = Request(handle, f"r{handle}", list(prompt), wanted, salt, list(digests), leader=leader)
        self.scheduler.add(request)
        self.requests[handle] = request
        self.tokens[handle] = []
        return request

    def dispatch(self) -> ScheduledStep | None:
        """Schedules a step and runs it on the ranks; checks the bounds of the step and both sides' block counts (I6)."""
        step = self.scheduler.schedule()
        if step is not None:
            self._run(step)
        return step

    def can_go_on(self, step: ScheduledStep) -> bool:
        """Whether the ranks would take another step by themselves: it is allowed, and no draw has ended its request."""
        stops = {row.handle: () if row.ban_stop else self.requests[row.handle].sampling.stop_token_ids for row in step.rows}
        return step.ahead > 0 and not any(self.sampled[handle] in stop for handle, stop in stops.items())

    def go_on(self, step: ScheduledStep) -> ScheduledStep:
        """Commits a step of a run, and runs the next one on the ranks."""
        assert all(each.finished is None for each in self.commit(step, more=True)), "an end within a run"
        following = self.scheduler.in_flight
        assert following is not None and following.ahead == step.ahead - 1
        self._run(following)
        return following

    def _run(self, step: ScheduledStep) -> None:
        self.steps.append(step)
        self.sampled = self.ranks.run(step, self.requests)
        assert step.num_tokens <= self.max_num_batched_tokens
        assert len(self.ranks.sequences) == self.scheduler.running <= self.max_num_seqs
        for member in range(self.layout.num_shards):
            held = self.ranks.held(member)
            assert self.scheduler.table_blocks[member] == len(held)
            assert self.scheduler.free_blocks[member] == self.blocks_per_member - len(set(held))

    def commit(self, step: ScheduledStep, failed: dict[int, str] | None = None, more: bool = False) -> list[Progress]:
        """Hands the results back and keeps what became of them."""
        failed = failed or {}
        sampled = {handle: token for handle, token in self.sampled.items() if handle not in failed}
        progress = self.scheduler.commit(step, sampled, failed, more=more)
        for each in progress:
            assert each.handle not in self.ended, "an event after the end"
            if each.new_token is not None:
                self.tokens[each.handle].append(each.new_token)
            if each.finished is not None:
                self.ended[each.handle] = each.finished
        return progress

    def step(self) -> ScheduledStep | None:
        """One whole step, with all that its run allows; None when there is nothing to do."""
        step = self.dispatch()
        if step is not None:
            while self.can_go_on(step):
                step = self.go_on(step)
            self.commit(step)
        return step

    def drain(self) -> int:
        """Steps until nothing is left to do; their number is bounded, or somebody starves. Returns it."""
        known = [len(r.prompt) + r.sampling.max_tokens for r in self.requests.values()]
        bound = 10 + sum(known) * (len(known) + 1)
        for count in range(bound):
            if self.step() is None:
                self.check_idle()
                return count
        raise AssertionError(f"not done after {bound} steps")

    def check_idle(self) -> None:
        """Nothing runs, nothing waits, nothing is remembered, every block is free."""
        assert not self.scheduler._kv._sequences
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        assert set(self.scheduler.free_blocks) == {self.ranks.blocks_per_member}

    def check_output(self, request: Request) -> None:
        """The request ended with the tokens it would have had alone, each of them reported once."""
        output, reason = run_alone(request.prompt, request.sampling)
        assert self.tokens[request.handle] == request.output == output
        assert self.ended[request.handle] == request.finish_reason == reason
