"""The contract of `Group`, the same for every implementation."""

import threading
import time

import pytest
import torch
from torch import Tensor

from cp_layout.sums import SCATTERED_SUM_BYTES
from rank_server.collectives import exchange
from rank_server.collectives.base import CollectiveError, Group
from tests.rank_server.collectives.harness import (
    CHUNKED_OPS,
    DTYPES,
    TENSOR_OPS,
    Implementation,
    call,
    check_mixed_operations,
    expected,
    open_groups,
    values,
)
from tests.rank_server.threads import run_ranks

ALL = [
    Implementation("solo", 1),
    *(Implementation("local", n) for n in (1, 2, 3, 4)),
    *(Implementation("gloo", n) for n in (1, 2, 3)),
    *(Implementation("shm", n) for n in (1, 2, 3, 8)),
    Implementation("shm_small", 3),
    *(Implementation("nccl", n) for n in (1, 2, 3, 4)),
]
SEVERAL = [each for each in ALL if each.size > 1]


@pytest.fixture(params=ALL, ids=str)
def groups(request: pytest.FixtureRequest) -> list[Group]:
    return request.param.open()


def run(groups: list[Group], op: str, inputs: list[Tensor], root: int = 0) -> list[Tensor]:
    """The operation on all members at once."""
    results = run_ranks(len(groups), lambda member: call(groups[member], op, inputs[member], root))
    return [result for result in results if result is not None]


def shape_for(op: str, size: int, *rest: int) -> tuple[int, ...]:
    return (size, *rest) if op in CHUNKED_OPS else rest


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_result_is_the_definition_for_every_dtype_and_shape(groups: list[Group], op: str) -> None:
    for dtype in DTYPES:
        for rest in ((), (1,), (3, 5), (0, 4)):
            inputs = [values(member, shape_for(op, len(groups), *rest), dtype) for member in range(len(groups))]
            for root in range(len(groups)) if op == "broadcast" else (0,):
                for member, result in enumerate(run(groups, op, inputs, root)):
                    wanted = expected(op, inputs, member, root)
                    assert wanted is not None and torch.equal(result, wanted)
                    assert (result.dtype, result.shape) == (dtype, wanted.shape)


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_non_contiguous_input(groups: list[Group], op: str) -> None:
    n = len(groups)
    straight = [values(member, (n, 6, 4), torch.float32) for member in range(n)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in straight]
    assert not turned[0].is_contiguous()
    for member, result in enumerate(run(groups, op, turned)):
        wanted = expected(op, straight, member)
        assert wanted is not None and torch.equal(result, wanted)


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_input_is_not_modified_and_result_is_no_alias(groups: list[Group], op: str) -> None:
    n = len(groups)
    for width in (3, SCATTERED_SUM_BYTES):
        inputs = [values(member, (n, width), torch.float32) for member in range(n)]
        before = [x.clone() for x in inputs]
        results = run(groups, op, inputs)
        for result in results:
            result.fill_(-1)
        for x, copy in zip(inputs, before, strict=True):
            assert torch.equal(x, copy)


@pytest.mark.parametrize(
    "numel", [SCATTERED_SUM_BYTES // 4 - 1, SCATTERED_SUM_BYTES // 4, SCATTERED_SUM_BYTES // 4 + 1, 50_000]
)
def test_all_reduce_is_the_sum_in_member_order_bit_for_bit(groups: list[Group], numel: int) -> None:
    inputs = [values(member, (numel,), torch.float32) * 10.0**member for member in range(len(groups))]
    wanted = expected("all_reduce", inputs, 0)
    for result in run(groups, "all_reduce", inputs):
        assert wanted is not None and torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [4, SCATTERED_SUM_BYTES])
def test_low_precision_is_summed_in_fp32(groups: list[Group], dtype: torch.dtype, numel: int) -> None:
    # The first integer whose successor the dtype can't hold: added one at a time in the dtype, the ones would be lost.
    big = 256.0 if dtype == torch.bfloat16 else 2048.0
    n = len(groups)
    inputs = [torch.full((n, numel), big if member == 0 else 1.0, dtype=dtype) for member in range(n)]
    exact = torch.tensor(big + n - 1, dtype=torch.float32).to(dtype)
    assert n < 3 or exact != big
    assert all((result == exact).all() for result in run(groups, "all_reduce", inputs))
    assert all((result == exact).all() for result in run(groups, "reduce_scatter", inputs))


def test_hundred_mixed_operations_in_order(groups: list[Group]) -> None:
    run_ranks(len(groups), lambda member: check_mixed_operations(groups[member]))
    assert {group.calls for group in groups} == {100}


def test_calls_are_counted_from_the_opening(groups: list[Group]) -> None:
    assert {group.calls for group in groups} == {0}
    run(groups, "all_reduce", [torch.zeros(SCATTERED_SUM_BYTES)] * len(groups))
    run(groups, "barrier", [torch.zeros(0)] * len(groups))
    assert {group.calls for group in groups} == {2}


def test_time_in_collectives_is_counted_the_wait_for_others_included(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [0.0], threading.Event()

    def clock() -> float:
        """Looked at by every member when a call begins, and when it ends; member 0 looks first."""
        seen = now[0]
        waits.set()
        return seen

    def member(index: int) -> float:
        if index > 0:
            assert waits.wait(timeout=20)
            now[0] = 7.0
        before = groups[index].seconds
        groups[index].barrier()
        return groups[index].seconds - before

    monkeypatch.setattr(exchange, "perf_counter", clock)
    first, *others = run_ranks(len(groups), member)
    assert first == pytest.approx(7.0 if others else 0.0)
    assert set(others) <= {0.0}


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_members_meet_over_nothing_as_well(groups: list[Group], op: str) -> None:
    """Replicas without rows of their own take part in every collective."""
    size = len(groups)
    inputs = [torch.zeros(shape_for(op, size, 0, 5), dtype=torch.bfloat16) for _ in groups]
    for member, result in enumerate(run(groups, op, inputs)):
        wanted = expected(op, inputs, member)
        assert wanted is not None
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
    assert {group.calls for group in groups} == {1}


def test_several_tensors_are_lent_by_one_call(groups: list[Group]) -> None:
    inputs = [[values(member, (len(groups), width), torch.float32, width) for width in (7, 2)] for member in range(len(groups))]
    results = run_ranks(len(groups), lambda member: groups[member].all_to_all_lent(*inputs[member]))
    for member, lent in enumerate(results):
        for number, chunks in enumerate(lent):
            wanted = expected("all_to_all", [each[number] for each in inputs], member)
            assert wanted is not None and torch.equal(torch.stack(list(chunks)), wanted)
    assert {group.calls for group in groups} == {1}


def test_wrong_arguments_are_refused_before_anybody_waits(groups: list[Group]) -> None:
    group = groups[0]
    for op in CHUNKED_OPS:
        with pytest.raises(ValueError, match=rf"{op} takes \[{group.size}, …\], got \[7, 2\]"):
            call(group, op, torch.zeros(7, 2))
        with pytest.raises(ValueError, match=op):
            call(group, op, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"one dtype, got \['torch.float32', 'torch.int64'\]"):
        group.all_to_all_lent(torch.zeros(group.size), torch.zeros(group.size, dtype=torch.int64))
    for root in (-1, group.size):
        with pytest.raises(ValueError, match=f"member {root} of {group.size}"):
            group.broadcast(torch.zeros(1), root)
    assert group.calls == 0


def test_a_closed_group_refuses_and_closes_twice(groups: list[Group]) -> None:
    groups[0].close()
    groups[0].close()
    with pytest.raises(CollectiveError, match=r"group g can't be used, member 0: closed"):
        groups[0].barrier()


@pytest.mark.parametrize("implementation", SEVERAL, ids=str)
def test_m1_an_absent_member_makes_the_others_raise_in_time_and_poisons(implementation: Implementation) -> None:
    groups = implementation.open(timeout_s=60.0)
    *present, absent = groups
    for group in groups:
        group.set_timeout(0.3)

    def wait_in_vain(member: int) -> float:
        start = time.monotonic()
        with pytest.raises(CollectiveError, match=rf"group g, member {member} of {len(groups)}: all_reduce failed"):
            present[member].all_reduce(torch.ones(3))
        return time.monotonic() - start

    assert max(run_ranks(len(present), wait_in_vain)) < 5.0
    for group in present:
        calls = group.calls
        group.set_timeout(60.0)
        with pytest.raises(CollectiveError, match=r"can't be used.*all_reduce failed"):
            group.all_gather(torch.ones(3))
        assert group.calls == calls
    absent.set_timeout(60.0)
    with pytest.raises(CollectiveError):
        run_ranks(1, lambda _: absent.all_reduce(torch.ones(3)), deadline_s=5.0)


@pytest.mark.parametrize("implementation", SEVERAL, ids=str)
def test_m1_close_from_another_thread_ends_a_running_operation(implementation: Implementation) -> None:
    groups = implementation.open(timeout_s=60.0)
    started = threading.Event()

    def member_main(member: int) -> None:
        if member == 1:
            assert started.wait(5.0)
            groups[0].close()
            return
        if member == 0:
            started.set()
            with pytest.raises(CollectiveError, match="group g"):
                groups[0].barrier()

    run_ranks(2, member_main, deadline_s=5.0)


@pytest.mark.parametrize("implementation", SEVERAL, ids=str)
def test_m2_a_member_that_leaves_is_noticed_by_those_who_wait(implementation: Implementation) -> None:
    groups = implementation.open(timeout_s=60.0)

    def member_main(member: int) -> None:
        if member == 0:
            groups[0].close()
            return
        with pytest.raises(CollectiveError):
            groups[member].barrier()

    run_ranks(len(groups), member_main, deadline_s=5.0)


@pytest.mark.parametrize("implementation", SEVERAL, ids=str)
def test_open_fails_in_time_when_a_member_does_not_come(implementation: Implementation) -> None:
    backends = implementation.backends()
    ranks = range(implementation.size)
    bootstrap = backends[0].prepare("g", ranks)

    def member_main(rank: int) -> float:
        start = time.monotonic()
        with pytest.raises(CollectiveError, match="group g"):
            backends[rank].open("g", ranks, rank, bootstrap, 0.5)
        return time.monotonic() - start

    assert max(run_ranks(implementation.size - 1, member_main)) < 5.0


@pytest.mark.parametrize("implementation", SEVERAL, ids=str)
def test_a_failed_group_is_reopened_under_its_name(implementation: Implementation) -> None:
    backends = implementation.backends()
    ranks = {"g": range(implementation.size)}
    for group in open_groups(backends, ranks):
        group["g"].close()
    again = [groups["g"] for groups in open_groups(backends, ranks)]
    results = run(again, "all_reduce", [torch.ones(2)] * len(again))
    assert all(torch.equal(result, torch.full((2,), float(len(again)))) for result in results)


@pytest.mark.parametrize("implementation", SEVERAL, ids=str)
def test_open_refuses_bootstrap_bytes_it_did_not_prepare(implementation: Implementation) -> None:
    backends = implementation.backends()
    with pytest.raises(CollectiveError, match="group g"):
        backends[0].open("g", range(implementation.size), 0, b"nonsense", 0.5)
    with pytest.raises(CollectiveError, match="group g"):
        backends[1].open("g", range(implementation.size), 1, b"nonsense", 0.5)


@pytest.mark.parametrize("implementation", [each for each in SEVERAL if each.size >= 3], ids=str)
def test_d9_groups_of_different_sizes_and_orders_interleaved(implementation: Implementation) -> None:
    n = implementation.size
    members = {"world": list(range(n)), "turned": list(reversed(range(n))), "low": [0, 1], "high": [n - 1, n - 2], "one": [1]}
    opened = open_groups(implementation.backends(), members)

    def rank_main(rank: int) -> None:
        for number in range(5):
            for name, ranks in members.items():
                if rank not in ranks:
                    continue
                group = opened[rank][name]
                assert (group.name, group.size, group.index) == (name, len(ranks), ranks.index(rank))
                gathered = group.all_gather(torch.tensor([rank, number]))
                assert gathered.tolist() == [[other, number] for other in ranks]

    run_ranks(n, rank_main)
