"""The compiled round of a shared-memory group: the results of the other way, and members that go either way together."""

import threading
import time

import pytest
import torch
from torch import Tensor

from rank_server.collectives.base import CollectiveError, Group
from rank_server.collectives.exchange import sum_in_member_order
from rank_server.collectives.shm import ShmBackend
from rank_server.collectives.shm_exchange import Exchange
from tests.rank_server.collectives.harness import (
    CHUNKED_OPS,
    DTYPES,
    SMALL_SLOT,
    call,
    check_mixed_operations,
    open_groups,
    values,
)
from tests.rank_server.threads import run_ranks

OPS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
MIXES = ["cc", "pp", "cp", "pc", "ccc", "cpc", "pcp", "cpcpcpcp", "cccccccc"]
"""Who goes which way: c compiled, p in Python."""
ROUND = Exchange.__call__


def opened(ways: str, slot_bytes: int = 4096, timeout_s: float = 20.0) -> list[Group]:
    backends = [ShmBackend(slot_bytes, compiled=way == "c") for way in ways]
    return [groups["g"] for groups in open_groups(backends, {"g": range(len(ways))}, timeout_s)]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.numel() else x


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each compiled call, whether it came to its end."""
    found: list[bool] = []

    def counted(self: Exchange, *arguments) -> bool:
        found.append(ROUND(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Exchange, "__call__", counted)
    return found


@pytest.mark.parametrize("ways", MIXES)
@pytest.mark.parametrize("op", OPS)
def test_the_bits_are_those_of_the_definition_whoever_goes_which_way(ways: str, op: str) -> None:
    size, groups = len(ways), opened(ways)
    shapes = [(width,) for width in (0, 1, 15, 16, 17, 33, 100)] + [(3, 5)]
    for dtype in DTYPES:
        for number, shape in enumerate(shapes):
            given = [values(member, (size, *shape) if op in CHUNKED_OPS else shape, dtype, number) for member in range(size)]
            if dtype.is_floating_point:
                # Orders of adding that differ give other bits.
                given = [x * 10.0**member for member, x in enumerate(given)]
            results = run_ranks(size, lambda member: call(groups[member], op, given[member]))  # noqa: B023
            for member, result in enumerate(results):
                parts = torch.stack([x[member] if op in CHUNKED_OPS else x for x in given])
                wanted = sum_in_member_order(parts.clone()) if op in ("all_reduce", "reduce_scatter") else parts
                assert result is not None
                assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
                assert torch.equal(bits(result), bits(wanted)), (dtype, shape, member)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_numbers_that_are_none(dtype: torch.dtype) -> None:
    # 48 numbers: smaller groups than LANES are summed by torch elsewhere, which keeps subnormal sums in bf16.
    inf = float("inf")
    given = [torch.tensor([inf, inf, float("nan"), -0.0, 1e38, 1e-40] * 8, dtype=dtype)] * 2
    given[1] = torch.tensor([inf, -inf, 1.0, -0.0, 3e38, 1e-40] * 8, dtype=dtype)
    groups = opened("cp")
    compiled, other = run_ranks(2, lambda member: groups[member].all_reduce(given[member]))
    torch.testing.assert_close(compiled, other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(compiled.signbit() | compiled.isnan(), other.signbit() | other.isnan())
    assert compiled[:6].isnan().tolist() == [False, True, True, False, False, False]


@pytest.mark.parametrize("ways", MIXES)
def test_hundred_mixed_operations_with_slots_that_some_tensors_fit(ways: str) -> None:
    groups = opened(ways, SMALL_SLOT)
    run_ranks(len(ways), lambda member: check_mixed_operations(groups[member]))


@pytest.mark.parametrize("op", OPS)
def test_what_fits_a_slot_is_one_call_and_nothing_else_is(op: str, rounds: list[bool]) -> None:
    size = 3
    groups = opened("ccc", SMALL_SLOT)
    most = SMALL_SLOT // size if op in CHUNKED_OPS else SMALL_SLOT
    for numbers, fits in ((most // 4, True), (most // 4 + 1, False)):
        shape = (size, numbers) if op in CHUNKED_OPS else (numbers,)
        rounds.clear()
        run_ranks(size, lambda member: call(groups[member], op, torch.ones(shape)))  # noqa: B023
        assert len(rounds) == (size if fits else 0)


def test_a_program_that_waits_too_long_says_what_it_took_and_python_takes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = opened("ccc")
    stopped = [threading.Event() for _ in groups]
    taken: dict[int, int] = {}

    def observed(self: Exchange, *arguments) -> bool:
        ended = ROUND(self, *arguments)
        member = [group._exchange for group in groups].index(self)  # type: ignore[attr-defined]
        if not ended:
            taken[member] = self.taken
        stopped[member].set()
        return ended

    def member_main(member: int) -> list[float]:
        if member > 0:
            assert stopped[member - 1].wait(10.0)
        return groups[member].all_reduce(torch.full((20,), 10.0**member)).tolist()

    monkeypatch.setattr(Exchange, "__call__", observed)
    assert run_ranks(3, member_main) == [[111.0] * 20] * 3
    # Member 0 met nobody, member 1 only member 0, and whom member 2 waited for had come.
    assert taken == {0: 0, 1: 1}
    assert run_ranks(3, lambda member: groups[member].all_gather(torch.tensor(member)).tolist()) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("ways", ["cc", "cp", "pc"])
def test_m2_a_member_that_leaves_while_another_waits(ways: str) -> None:
    groups = opened(ways, timeout_s=60.0)

    def member_main(member: int) -> None:
        if member == 1:
            groups[1].close()
            return
        with pytest.raises(CollectiveError, match="all_reduce failed: member 1 has left the group"):
            groups[0].all_reduce(torch.ones(3))

    run_ranks(2, member_main, deadline_s=10.0)


def test_m1_close_from_another_thread_ends_a_round_wherever_it_is() -> None:
    for number in range(30):
        groups = opened("cc", timeout_s=60.0)
        entered = threading.Event()

        def member_main(member: int, groups=groups, entered=entered, number=number) -> None:
            if member == 1:
                assert entered.wait(5.0)
                begun = time.perf_counter()
                while time.perf_counter() - begun < number * 10e-6:  # within the spin, and behind it
                    pass
                groups[0].close()
                return
            entered.set()
            with pytest.raises(CollectiveError, match="group g"):
                groups[0].all_reduce(torch.ones(3))

        run_ranks(2, member_main, deadline_s=10.0)


def test_m1_the_deadline_holds_and_names_who_is_missing() -> None:
    groups = opened("ccc", timeout_s=60.0)
    groups[0].set_timeout(0.2)
    groups[1].set_timeout(60.0)

    def member_main(member: int) -> float:
        begun = time.monotonic()
        missing = r"members \[2\] did not come within 0.2 s" if member == 0 else "member 0 has left the group"
        with pytest.raises(CollectiveError, match=missing):
            groups[member].all_gather(torch.ones(3))
        return time.monotonic() - begun

    assert 0.2 <= run_ranks(2, member_main, deadline_s=10.0)[0] < 5.0


@pytest.mark.parametrize("ways", ["cc", "cp", "pc"])
@pytest.mark.parametrize("second", [torch.ones(5), torch.ones(2, 2)], ids=["size", "operation"])
def test_d10_members_that_disagree_whoever_goes_which_way(ways: str, second: Tensor) -> None:
    groups = opened(ways)

    def member_main(member: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            if member == 0:
                groups[0].all_reduce(torch.ones(4))
            else:
                groups[1].all_gather(second)
        return str(caught.value)

    for message in run_ranks(2, member_main, deadline_s=5.0):
        assert "all_reduce of 16 bytes" in message
        assert f"all_gather of {second.nbytes} bytes" in message
