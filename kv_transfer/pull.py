"""What a target rank is asked to pull, within which limits, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cp_layout.reshard import Side


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds.

    message_bytes: 0.25 to 2 MiB go fastest. bytes_in_flight: on their way to this rank, all sources together. attempts: of
    one source, the first included. idle_s: without a message.
    call_s: of a call that carries no KV. deadline_s: of a whole pull, from its beginning.
    """

    message_bytes: int = 1 << 20
    bytes_in_flight: int = 64 << 20
    attempts: int = 3
    idle_s: float = 5.0
    call_s: float = 5.0
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a source rank listens, and which life of it is meant."""

    address: str
    instance: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Tokens [start, end) of a session into blocks of this rank.

    source, target: both sides with the request's shard offsets. blocks: this rank's block table of the request from column
    `first_column` on, reserved for it since the stamp `generation`. peers: source ranks by their index in the source's DP
    index; those that have nothing for this rank are not asked.
    """

    session: int
    epoch: int
    source: Side
    target: Side
    start: int
    end: int
    blocks: Sequence[int]
    generation: int
    peers: Mapping[int, Peer]
    first_column: int = 0


@dataclass(slots=True)
class Report:
    """What a pull has done; also of one that failed, as far as it came."""

    messages: int = 0
    """Written to the pool, each once."""
    payload_bytes: int = 0
    shared_bytes: int = 0
    """Part of the payload that was copied from a pool on this host."""
    duplicates: int = 0
    """Intact, but written before."""
    corrupted: int = 0
    """Checksum, length or index wrong: dropped, and fetched again."""
    stale: int = 0
    """Intact, but of another attempt, epoch, generation, range or rank: dropped."""
    retries: int = 0
    """Further attempts at one source."""


class TransferFailed(Exception):
    """The pull has written nothing but tokens of the session, perhaps not all of them; the caller recomputes or fails.

    reason: a stable upper-case word, that of the `KvloomError` that ended it, or CORRUPTED, TARGET_REUSED, PEER_UNKNOWN.
    """

    def __init__(self, reason: str, pull: Pull, detail: str, report: Report) -> None:
        tokens = f"tokens [{pull.start}, {pull.end})"
        got = f"{report.payload_bytes} bytes in {report.messages} messages had arrived"
        super().__init__(f"transfer {pull.session}, {tokens} into {len(pull.blocks)} blocks: {detail}; {got}")
        self.reason = reason
        self.report = report
