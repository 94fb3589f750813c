"""Where seeds come from."""

import secrets
import struct
from collections.abc import Callable
from hashlib import sha256
from random import Random


class SeedSource:
    """Seeds for requests that bring none: unpredictable, or a fixed sequence when the operator gave a seed."""

    def __init__(self, seed: int | None) -> None:
        self._bits: Callable[[int], int] = secrets.randbits if seed is None else Random(seed).getrandbits

    def draw(self) -> int:
        """64 bits."""
        return self._bits(64)


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request with this seed (0 … 2^64 − 1): a function of the two alone, so that a retry
    draws the same. Completion 0 has the request's own seed, the others the first eight bytes of
    SHA-256("completion" ‖ seed ‖ index), numbers and digest read as 64-bit little-endian integers.
    """
    if index == 0:
        return seed
    return int.from_bytes(sha256(b"completion" + struct.pack("<QQ", seed, index)).digest()[:8], "little")
