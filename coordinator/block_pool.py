"""The KV blocks of one pool member: who holds them, and which ones the prefix cache may still name."""

from collections import OrderedDict


class PoolError(RuntimeError):
    """A block is used against the rules of its pool; always a fault of the coordinator itself."""


class BlockPool:
    """Block ids 0..num_blocks−1 of one member. A block is in exactly one of three places:

    - free: nobody holds it, its content means nothing;
    - held: one or more requests hold it (reference count ≥ 1), cached or not;
    - evictable: nobody holds it, but the prefix cache names its content. It counts as free.

    Blocks are taken from the free ones first, the last one freed first, so that ids which a request gave back, its table's end
    first, ascend again; then from the evictable ones, the longest unused first. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self._references = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, evictable ones included."""
        return len(self._free) + len(self._evictable)

    def is_held(self, block: int) -> bool:
        """Whether a request holds the block."""
        return self._references[block] > 0

    def take(self) -> tuple[int, bool]:
        """A block for one new holder, and whether the prefix cache named it until now and has to forget it.

        Raises `PoolError` when no block is free.
        """
        if self._free:
            block, evicted = self._free.pop(), False
        elif self._evictable:
            block, evicted = self._evictable.popitem(last=False)[0], True
            self._cached[block] = False
        else:
            raise PoolError(f"none of the {self.num_blocks} blocks is free")
        self._references[block] = 1
        return block, evicted

    def share(self, block: int) -> None:
        """One more holder of a cached block; it is not evictable any more."""
        if not self._cached[block]:
            raise PoolError(f"block {block} is shared but not cached")
        self._evictable.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one makes the block free, or evictable if it is cached."""
        if self._references[block] == 0:
            raise PoolError(f"block {block} is released but nobody holds it")
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        if self._cached[block]:
            self._evictable[block] = None
        else:
            self._free.append(block)

    def mark_cached(self, block: int) -> None:
        """The prefix cache names the block from now on; somebody must hold it."""
        if self._references[block] == 0 or self._cached[block]:
            raise PoolError(f"block {block} enters the prefix cache while {'cached' if self._cached[block] else 'not held'}")
        self._cached[block] = True

    def unmark_cached(self, block: int) -> None:
        """The prefix cache has forgotten the block: an evictable one becomes free, a held one stays held."""
        if not self._cached[block]:
            raise PoolError(f"block {block} leaves the prefix cache but is not in it")
        self._cached[block] = False
        if self._references[block] == 0:
            del self._evictable[block]
            self._free.append(block)
