"""Groups of every implementation, as the contract suite opens them, and what the collectives mean by definition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rank_server.collectives.base import Backend, Group
from rank_server.collectives.gloo import GlooBackend
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.nccl import NcclBackend
from rank_server.collectives.shm import ShmBackend
from rank_server.collectives.solo import SoloGroup
from tests.rank_server.collectives.recorder import HostQueue, Recorder
from tests.rank_server.threads import run_ranks

SMALL_SLOT = 1000
"""Bytes of a slot that is no multiple of a line, a word or a number of members."""


@dataclass(frozen=True)
class Implementation:
    """A backend with a number of members, one thread each."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}-{self.size}"

    def backends(self) -> list[Backend]:
        """One backend per rank."""
        if self.name == "gloo":
            return [GlooBackend("127.0.0.1") for _ in range(self.size)]
        if self.name.startswith("shm"):
            return [shm_backend(self.name) for _ in range(self.size)]
        if self.name == "nccl":
            module = Recorder()
            return [NcclBackend(module, HostQueue(module)) for _ in range(self.size)]
        hub = LocalHub()
        return [LocalBackend(hub) for _ in range(self.size)]

    def open(self, timeout_s: float = 20.0) -> list[Group]:
        """One group of all ranks, seen by each of them."""
        if self.name == "solo":
            return [SoloGroup("g")]
        return [groups["g"] for groups in open_groups(self.backends(), {"g": range(self.size)}, timeout_s)]


def shm_backend(name: str) -> ShmBackend:
    """`shm` as it is used, or `shm_small`: slots that hardly any tensor of the tests fits into."""
    return ShmBackend(slot_bytes=SMALL_SLOT) if name == "shm_small" else ShmBackend()


def open_groups(
    backends: Sequence[Backend], groups: dict[str, Sequence[int]], timeout_s: float = 20.0
) -> list[dict[str, Group]]:
    """Opens the groups (name → ranks) one after the other; returns each rank's groups by name."""
    opened: list[dict[str, Group]] = [{} for _ in backends]
    for name, ranks in groups.items():
        bootstrap = backends[ranks[0]].prepare(name, ranks)

        def join(member: int, name: str = name, ranks: Sequence[int] = ranks, bootstrap: bytes = bootstrap) -> None:
            rank = ranks[member]
            opened[rank][name] = backends[rank].open(name, ranks, rank, bootstrap, timeout_s)

        run_ranks(len(ranks), join)
    return opened


def values(member: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The member's input: different on every member and the same on every call."""
    generator = torch.Generator().manual_seed(1000 * seed + member)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Sum in member order, in fp32 for floats."""
    dtype = parts[0].dtype
    wide = [part if dtype == torch.int64 else part.to(torch.float32) for part in parts]
    result = wide[0].clone()
    for part in wide[1:]:
        result = result + part
    return result.to(dtype)


def expected(op: str, inputs: Sequence[Tensor], member: int, root: int = 0) -> Tensor | None:
    """Result of the operation on a member by definition; inputs of all members in member order."""
    if op == "all_gather":
        return torch.stack(list(inputs))
    if op == "all_reduce":
        return total(inputs)
    if op == "reduce_scatter":
        return total([x[member] for x in inputs])
    if op in ("all_to_all", "all_to_all_lent"):
        return torch.stack([x[member] for x in inputs])
    if op == "broadcast":
        return inputs[root]
    return None


def call(group: Group, op: str, x: Tensor, root: int = 0) -> Tensor | None:
    """The operation by name."""
    calls: dict[str, Callable[[], Tensor | None]] = {
        "all_gather": lambda: group.all_gather(x),
        "all_reduce": lambda: group.all_reduce(x),
        "reduce_scatter": lambda: group.reduce_scatter(x),
        "all_to_all": lambda: group.all_to_all(x),
        "all_to_all_lent": lambda: torch.stack(list(group.all_to_all_lent(x)[0])),
        "broadcast": lambda: group.broadcast(x, root),
        "barrier": group.barrier,
    }
    return calls[op]()


TENSOR_OPS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "all_to_all_lent", "broadcast")
CHUNKED_OPS = ("reduce_scatter", "all_to_all", "all_to_all_lent")
OPERATIONS = (*TENSOR_OPS, "barrier")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def check_mixed_operations(group: Group, count: int = 100) -> None:
    """Runs `count` operations in an order that all members draw alike and compares each with its definition."""
    plan = torch.Generator().manual_seed(7)

    def draw(choices: int) -> int:
        return int(torch.randint(choices, (1,), generator=plan))

    for number in range(count):
        op = OPERATIONS[draw(len(OPERATIONS))]
        dtype, root, width = DTYPES[draw(4)], draw(group.size), draw(50)
        shape = (group.size, width, 2) if op in CHUNKED_OPS else (width, 3)
        inputs = [values(member, shape, dtype, seed=number) for member in range(group.size)]
        result, wanted = call(group, op, inputs[group.index], root), expected(op, inputs, group.index, root)
        same = result is None if wanted is None else result is not None and torch.equal(result, wanted)
        assert same, f"operation {number}, {op} of {dtype} {list(shape)}: {result} instead of {wanted}"
