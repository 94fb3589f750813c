"""Names of cached blocks: keyed, chained SHA-256 digests over the tokens of a prefix.

A digest names the *content* of one hash unit and of everything before it, so equal digests mean equal KV (A9, F1):

- I = B, and N = 1: the unit is one block of B tokens, which lies whole on one member. Its KV does not depend on N, so
  neither does its digest: a prefix cached under one N is found under another.
- I < B (N > 1): a block holds scattered runs, so the unit is one virtual block of N·B tokens, and N and I are in the key.

Where a unit lies (member, block ids, shard offset) is the cache's business and never part of its name.
"""

import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256

from cp_layout.errors import LayoutError
from cp_layout.interleave import Layout

DIGEST_BYTES = 32
"""Length of every digest: SHA-256."""

_DOMAIN = b"kvloom prefix v1"


def reusable_tokens(prompt_len: int, layout: Layout) -> int:
    """Longest prefix of the prompt that a cache hit may cover, in tokens (F2).

    The largest number of whole virtual blocks that leaves at least one token to recompute, because the first output token
    needs the logits of the prompt's last position: a prompt of exactly one virtual block reuses nothing.
    """
    return max(prompt_len - 1, 0) // layout.virtual_block_size * layout.virtual_block_size


def cache_identity(facts: Mapping[str, str | int]) -> bytes:
    """Digest of the facts that make KV comparable at all (model hash, cache dtype, …); independent of their order."""
    digest = sha256(_DOMAIN)
    for name in sorted(facts):
        digest.update(_framed(name.encode()))
        value = facts[name]
        digest.update(_framed(f"{type(value).__name__}:{value}".encode()))
    return digest.digest()


class BlockHasher:
    """Digests of the hash units of token sequences under one layout, one cache identity and one tenant's salt.

    Two hashers agree on a digest exactly when identity, salt, the unit law of the layout and all tokens up to the unit's
    end are equal. Whoever does not know the salt cannot predict a digest. Immutable, safe to share between requests.
    """

    def __init__(self, layout: Layout, identity: bytes, salt: bytes) -> None:
        n, i, b = layout.num_shards, layout.interleave, layout.block_size
        whole_blocks = n == 1 or i == b
        self._unit_tokens = b if whole_blocks else layout.virtual_block_size
        self._units_per_virtual_block = n if whole_blocks else 1
        law = struct.pack("<QQQ", b, *((1, b) if whole_blocks else (n, i)))
        self._keyed = sha256(_DOMAIN + sha256(_framed(salt) + _framed(identity) + law).digest())
        self._packed = struct.Struct(f"<{self._unit_tokens}I")

    @property
    def unit_tokens(self) -> int:
        """Tokens of one hash unit: B when blocks are whole (I = B or N = 1), N·B otherwise."""
        return self._unit_tokens

    @property
    def units_per_virtual_block(self) -> int:
        """Hash units in one virtual block: N when blocks are whole, 1 otherwise."""
        return self._units_per_virtual_block

    @property
    def root(self) -> bytes:
        """The digest before the first unit: what `extend` continues from at position 0."""
        return bytes(DIGEST_BYTES)

    def extend(self, prev: bytes, tokens: Sequence[int]) -> bytes:
        """Digest of the unit that follows the chain `prev`; its cost does not depend on the length of the history.

        tokens: exactly `unit_tokens` ids, each in 0…2³²−1, else `LayoutError`; prev: `root` or an earlier digest.
        """
        if len(prev) != DIGEST_BYTES:
            raise LayoutError(f"a chain continues from a digest of {DIGEST_BYTES} bytes, got {len(prev)}")
        if len(tokens) != self._unit_tokens:
            raise LayoutError(f"a hash unit has {self._unit_tokens} tokens, got {len(tokens)}")
        digest = self._keyed.copy()
        digest.update(prev)
        try:
            digest.update(self._packed.pack(*tokens))
        except struct.error:
            raise LayoutError("a token id of the hash unit is not an integer in 0 to 2**32 - 1") from None
        return digest.digest()

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Digests of all full units of the sequence, in order; tokens after the last full unit are not covered."""
        unit = self._unit_tokens
        chain: list[bytes] = []
        digest = self.root
        for start in range(0, len(tokens) - unit + 1, unit):
            digest = self.extend(digest, tokens[start : start + unit])
            chain.append(digest)
        return chain


def _framed(data: bytes) -> bytes:
    """The bytes behind their length, so that neighbouring fields cannot trade bytes."""
    return struct.pack("<Q", len(data)) + data
