"""One rank in the benchmark's own process: the executor fed with plans, without coordinator and wire."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import common_pb2, rank_pb2
from model_files import ModelFiles
from rank_server.collectives.base import Group
from rank_server.executor import Executor

BLOCK_SIZE = 128
WORDS = range(100, 40100)
"""Token ids that prompts are made of."""
STEP_TIMEOUT_MS = 600_000


def prompt_of(length: int, words: Sequence[int]) -> list[int]:
    """So many words in no order; equal lengths have equal prompts."""
    return [words[(i * 7919 + length) % len(words)] for i in range(length)]


@dataclass
class OneRank:
    """A rank of a cluster of one in the given dtype, with a pool for `max_tokens` tokens.

    chunk: tokens of a prefill step.
    """

    files: ModelFiles
    max_tokens: int
    dtype: str = "bfloat16"
    chunk: int = 512
    executor: Executor = field(init=False)
    pool_bytes: int = field(init=False)
    weight_bytes: int = field(init=False)
    _ticket: int = 0

    def __post_init__(self) -> None:
        config = common_pb2.ClusterConfig(
            tp=1,
            pcp=1,
            dcp=1,
            dp=1,
            interleave=BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            merge=common_pb2.MERGE_A2A,
            dtype=self.dtype,
            kv_cache_dtype=self.dtype,
            kv_cache_tokens_per_rank=-(-self.max_tokens // BLOCK_SIZE) * BLOCK_SIZE,
            collectives="none",
            device="cpu",
            protocol_version=PROTOCOL_VERSION,
        )
        self.executor = Executor(self.files, {"none": _NoGroups}, lambda: None)
        configured = self.executor.configure(config, 0)
        self.weight_bytes = configured.weight_bytes
        self.pool_bytes = self.executor.allocate_pool(configured.max_kv_blocks).bytes

    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float, list[float]]:
        """Greedy continuation: (tokens, seconds to the first one, seconds of each further one)."""
        begun = time.perf_counter()
        handle = self._ticket + 1
        admitted = [
            rank_pb2.AdmittedRequest(handle=handle, num_prompt_tokens=len(prompt), num_prefill_tokens=len(prompt)),
        ]
        output: list[int] = []
        for start in range(0, len(prompt), self.chunk):
            piece = prompt[start : start + self.chunk]
            output = self._step(handle, start, piece, start + len(piece) == len(prompt), 0, admitted)
            admitted = []
        times = [time.perf_counter() - begun]
        for index in range(1, new_tokens):
            begun = time.perf_counter()
            output += self._step(handle, len(prompt) + index - 1, output[-1:], True, index)
            times.append(time.perf_counter() - begun)
        self._ticket += 1
        self.executor.step(self._plan(released=[handle]))
        return output, times[0], times[1:]

    def _step(
        self,
        handle: int,
        start: int,
        tokens: Sequence[int],
        sample: bool,
        index: int,
        admitted: Sequence[rank_pb2.AdmittedRequest] = (),
    ) -> list[int]:
        blocks = range(-(-start // BLOCK_SIZE), -(-(start + len(tokens)) // BLOCK_SIZE))
        row = rank_pb2.StepRow(
            handle=handle,
            start=start,
            token_ids=tokens,
            new_block_ids=blocks,
            new_block_counts=[len(blocks)] if blocks else [],
            sample=sample,
            output_index=index,
        )
        self._ticket += 1
        result = self.executor.step(self._plan(admitted=admitted, rows=[row]))
        return [token.token_id for token in result.sampled]

    def _plan(
        self,
        admitted: Sequence[rank_pb2.AdmittedRequest] = (),
        rows: Sequence[rank_pb2.StepRow] = (),
        released: Sequence[int] = (),
    ) -> rank_pb2.StepPlan:
        return rank_pb2.StepPlan(
            ticket=self._ticket,
            timeout_ms=STEP_TIMEOUT_MS,
            decode_mode=common_pb2.DECODE_MODE_REPLICATED,
            gather=common_pb2.GATHER_NONE,
            released=released,
            admitted=admitted,
            rows=rows,
        )


class _NoGroups:
    """A `Backend` for a rank that is alone."""

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        raise ValueError(f"group {name} has one member")

    def open(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> Group:
        raise ValueError(f"group {name} has one member")
