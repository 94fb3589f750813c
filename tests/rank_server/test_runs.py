"""Steps that ranks take by themselves, on members that draw at random places of a group."""

import pytest
import torch

from cp_wire.pb import rank_pb2
from rank_server import runs
from rank_server.collectives.local import LocalBackend, LocalHub
from rank_server.collectives.solo import SoloGroup
from rank_server.runs import run
from rank_server.sequences import Sequence, SequenceSampling, SequenceTable
from tests.rank_server.threads import run_ranks

CPU = torch.device("cpu")
STOP = 99


def table(*handles: int) -> SequenceTable:
    sequences = SequenceTable()
    for handle in handles:
        sampling = SequenceSampling(
            temperature=0.0, top_p=1.0, top_k=0, seed=0, top_logprobs=0, stop_token_ids=(STOP,), min_p=0.0, bias=(),
            logprobs=False, prompt_logprobs=0,
        )  # fmt: skip
        sequences.admit(Sequence(handle, 0, 0, owner=0, num_prefill_tokens=3, sampling=sampling, num_computed=3))
    return sequences


def a_plan(ahead: int, *handles: int, ban_stop: bool = False) -> rank_pb2.StepPlan:
    rows = [
        rank_pb2.StepRow(
            handle=handle, start=3, token_ids=[5], new_block_ids=[8], new_block_counts=[1], sample=True, output_index=1,
            ban_stop=ban_stop,
        )
        for handle in handles
    ]  # fmt: skip
    return rank_pb2.StepPlan(ticket=1, ahead=ahead, rows=rows, released=[4], admitted=[rank_pb2.AdmittedRequest(handle=1)])


class Member:
    """Draws for some requests: token = 10·(output index) + handle, or what `says` has for (handle, index)."""

    def __init__(self, draws: set[int], says: dict[tuple[int, int], int] | None = None) -> None:
        self.draws = draws
        self.says = says or {}
        self.failing: tuple[int, int] | None = None
        self.plans: list[rank_pb2.StepPlan] = []
        self.told: list[int | None] = []
        self.times_us: list[int] = []
        self.last: rank_pb2.StepResult | None = None
        self.wants_end = lambda: False

    def step(self, plan: rank_pb2.StepPlan, meanwhile) -> rank_pb2.StepResult:
        meanwhile()
        kept = rank_pb2.StepPlan()
        kept.CopyFrom(plan)
        self.plans.append(kept)
        result = rank_pb2.StepResult(ticket=plan.ticket)
        for row in plan.rows:
            key = row.handle, row.output_index
            if key == self.failing:
                result.sampled.add(handle=row.handle, error="not finite")
            elif row.handle in self.draws:
                result.sampled.add(handle=row.handle, token_id=self.says.get(key, 10 * row.output_index + row.handle))
        return result

    def tell(self, result: rank_pb2.StepResult | None, worker_us: int) -> None:
        self.times_us.append(worker_us)
        self.told.append(None if result is None else result.index)

    def take(self, plan: rank_pb2.StepPlan, group) -> None:
        handles = [row.handle for row in plan.rows]
        self.last = run(plan, self.step, table(*handles), group, CPU, lambda: self.wants_end(), self.tell)


def together(members: list[Member], plan: rank_pb2.StepPlan) -> None:
    """Every member on a thread of its own."""
    backend, names = LocalBackend(LocalHub()), list(range(len(members)))
    bootstrap = backend.prepare("wide:0", names)

    def take(index: int) -> None:
        own = rank_pb2.StepPlan()
        own.CopyFrom(plan)
        members[index].take(own, backend.open("wide:0", names, index, bootstrap, 10.0))

    run_ranks(len(members), take)


def test_each_step_goes_on_from_what_the_one_before_drew():
    member = Member({1, 2})
    member.take(a_plan(2, 1, 2), SoloGroup("wide:0"))
    first, *later = member.plans
    assert len(first.admitted) == len(first.released) == 1 and first.rows[0].new_block_ids
    assert not any(
        plan.admitted or plan.released or row.new_block_ids or row.new_block_counts for plan in later for row in plan.rows
    )
    rows = [[(row.start, list(row.token_ids), row.output_index) for row in plan.rows] for plan in member.plans]
    assert rows == [
        [(3, [5], 1), (3, [5], 1)],
        [(4, [11], 2), (4, [12], 2)],
        [(5, [21], 3), (5, [22], 3)],
    ]
    assert member.told == [0, 1] and member.last.index == 2


@pytest.mark.parametrize("draws", [({1, 2}, set()), (set(), {1, 2}), ({1}, {2}), ({2}, set(), {1})])
def test_members_take_the_same_steps_whoever_draws(draws):
    members = [Member(each) for each in draws]
    together(members, a_plan(4, 1, 2))
    for member in members:
        assert member.plans == members[0].plans and member.last.index == 4
        assert [[list(row.token_ids) for row in plan.rows] for plan in member.plans[1:]] == [
            [[10 * index + handle] for handle in (1, 2)] for index in (1, 2, 3, 4)
        ]
        assert member.told == ([0, 1, 2, 3] if member.draws else [None] * 4)


def ends_at(members: list[Member], plan: rank_pb2.StepPlan) -> list[int]:
    together(members, plan)
    return [member.last.index for member in members]


def test_a_stop_token_ends_the_run_for_all():
    members = [Member({1}), Member({2}, {(2, 3): STOP})]
    assert ends_at(members, a_plan(6, 1, 2)) == [2, 2]


def test_a_banned_stop_token_is_a_token_like_others():
    """It can't be drawn: what looks like it is none."""
    members = [Member({1}), Member({2}, {(2, 3): STOP})]
    assert ends_at(members, a_plan(6, 1, 2, ban_stop=True)) == [6, 6]


def test_a_draw_that_fails_ends_the_run_for_all():
    members = [Member({1}), Member({2})]
    members[1].failing = (2, 2)
    assert ends_at(members, a_plan(6, 1, 2)) == [1, 1]
    assert members[1].last.sampled[0].error == "not finite"


@pytest.mark.parametrize("asked", [0, 1])
def test_any_member_may_end_the_run(asked):
    members = [Member({1, 2}), Member(set())]
    members[asked].wants_end = lambda: len(members[asked].plans) == 3
    assert ends_at(members, a_plan(6, 1, 2)) == [2, 2]


def test_a_plan_that_allows_nothing_is_one_step_and_exchanges_nothing():
    member = Member({1})
    member.take(a_plan(0, 1), object())
    assert len(member.plans) == 1 and member.last.index == 0 and not member.told


class Clock:
    """Time that a test lets go by."""

    def __init__(self, monkeypatch) -> None:
        self.us = 0
        monkeypatch.setattr(runs, "perf_counter_ns", lambda: 1000 * self.us)


class Slow(SoloGroup):
    """Two members that say the same, in an exchange that takes 5 µs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("wide:0")
        self.size = 2
        self._clock = clock

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.us += 5
        self.seconds += 5e-6
        return torch.stack([x, x])


def test_each_step_has_its_own_time_and_that_of_the_exchange_after_it(monkeypatch):
    clock = Clock(monkeypatch)
    member = Member({1})
    step, results = member.step, []

    def timed(plan: rank_pb2.StepPlan, meanwhile) -> rank_pb2.StepResult:
        clock.us += 100 * (1 + len(member.plans))
        result = step(plan, meanwhile)
        result.collective_us = 40
        results.append(result)
        return result

    plan = a_plan(2, 1)
    run(plan, timed, table(1), Slow(clock), CPU, lambda: False, member.tell)
    assert member.times_us == [105, 205]
    assert [result.collective_us for result in results] == [45, 45, 40]
