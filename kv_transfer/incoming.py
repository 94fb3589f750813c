"""The part of a pull that comes from one source rank: which messages are missing, and what may be written where."""

import numpy as np

from cp_layout.packing import Packing
from cp_layout.reshard import Link, Runs
from kv_transfer.framing import Corrupted, Frame, Stream
from kv_transfer.generations import Generations
from kv_transfer.pull import Pull, Report
from kv_transfer.store import ArrayStore, Int64s, Picked, Store, pick


class TargetReused(Exception):
    """A block that the pull writes to has another owner by now."""


class Incoming:
    """Takes the messages of one link, in any order, any number of times, and writes each once. `begin` comes first."""

    def __init__(
        self,
        pull: Pull,
        link: Link,
        runs: Runs,
        store: Store,
        generations: Generations,
        message_bytes: int,
        report: Report,
    ) -> None:
        geometry = store.geometry
        row_bytes = link.num_heads * geometry.head_bytes
        self.packing = Packing(geometry.planes, runs.tokens, row_bytes, message_bytes)
        self._rows = [self.packing.rows(message) for message in range(self.packing.num_messages)]
        self.missing = set(range(len(self._rows)))
        self._stream: Stream | None = None
        self._pull = pull
        self._link = link
        self._store = store
        self._generations = generations
        self._report = report
        slots: Int64s = runs.dst_slots(np.asarray(pull.blocks, np.int64), geometry.block_size, pull.first_column)
        self._blocks = np.unique(slots // geometry.block_size)
        self._picked = pick(geometry, slots, link.dst_head, link.num_heads, self.packing.rows_per_message)

    def begin(self, attempt: int, generation: int) -> None:
        """From now on messages of this attempt count, and those of the source's blocks of this generation."""
        pull, link = self._pull, self._link
        self._stream = Stream(pull.session, attempt, pull.epoch, generation, link.src, link.dst, pull.start, pull.end)

    def take(self, frame: Frame) -> None:
        """Writes the payload where it belongs, if it is what was asked for and not there yet.

        `Corrupted` when it is damaged: nothing of it is believed, not even its index. `TargetReused` when this rank's own
        blocks are no longer the pull's. What is intact but of another identity, or already written, is dropped and counted.
        """
        frame.check()
        header, payload, report = frame.header, frame.payload, self._report
        if header.stream != self._stream:
            report.stale += 1
            return
        if header.message >= len(self._rows):
            raise Corrupted(f"message {header.message} is not one of {len(self._rows)}")
        rows = self._rows[header.message]
        if (header.first_row, header.num_rows) != (rows.start, len(rows)):
            raise Corrupted(f"message {header.message} has rows from {header.first_row}, not from {rows.start}")
        if len(payload) != len(rows) * self.packing.row_bytes:
            raise Corrupted(f"message {header.message} has {len(payload)} bytes for {len(rows)} rows")
        if header.message not in self.missing:
            report.duplicates += 1
            return
        self._check_blocks()
        self._store.write(self._picked, rows, payload)
        self.count(header.message)

    def count(self, message: int) -> None:
        """The message is written and true."""
        self.missing.discard(message)
        self._report.messages += 1
        self._report.payload_bytes += len(self._rows[message]) * self.packing.row_bytes

    def copy(self, rows: range, pool: ArrayStore, picked: Picked) -> None:
        """Copies a piece of the link's rows out of a pool that this process can read to where it belongs; `TargetReused`.

        picked: the link's rows there.
        """
        self._check_blocks()
        self._store.copy(self._picked, rows, pool, picked)

    def _check_blocks(self) -> None:
        # Between this look and the end of the write nothing else runs on the thread, and owners change only once no pull of
        # theirs is running; the look catches a caller that breaks that rule.
        if not self._generations.untouched(self._blocks, self._pull.generation):
            raise TargetReused
