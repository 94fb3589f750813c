"""What a transfer sends beyond the tokens themselves, by its unit: virtual blocks, blocks, tokens."""

from dataclasses import dataclass

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout


@dataclass(frozen=True, slots=True)
class Sent:
    """Token slots that a transfer sends of `useful` tokens."""

    useful: int
    sent: int

    @property
    def waste(self) -> float:
        """Share of what is sent that is no token of the range: 1 − useful/sent, 0 when nothing is sent."""
        return 1 - self.useful / self.sent if self.sent else 0.0


def token_exact(start: int, end: int) -> Sent:
    """Tokens [start, end) and nothing else."""
    return Sent(_length(start, end), end - start)


def whole_blocks(layout: Layout, start: int, end: int) -> Sent:
    """Every block that holds a token of [start, end), from the shard that owns it: B·Σ_r blocks."""
    useful, b = _length(start, end), layout.block_size
    blocks = 0
    for shard in range(layout.num_shards):
        low, high = layout.local_len(shard, start), layout.local_len(shard, end)
        blocks += -(-high // b) - low // b if high > low else 0
    return Sent(useful, blocks * b)


def whole_virtual_blocks(layout: Layout, start: int, end: int) -> Sent:
    """Every virtual block that holds a token of [start, end), from all N shards whether or not they own one."""
    useful, v = _length(start, end), layout.virtual_block_size
    return Sent(useful, (-(-end // v) - start // v) * v if useful else 0)


def _length(start: int, end: int) -> int:
    if not 0 <= start <= end:
        raise LayoutError(f"tokens [{start}, {end}) are not a range: 0 <= start <= end")
    return end - start
