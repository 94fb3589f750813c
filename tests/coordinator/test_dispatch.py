"""The order of steps over the cluster."""

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from coordinator.dispatch import Dispatcher, TicketOrder


def test_groups_without_common_ranks_never_wait_for_each_other():
    order = TicketOrder()
    first, second = order.draw({0, 1}), order.draw({2})
    assert order.startable() == [first, second]
    third = order.draw({2})
    assert order.startable() == []
    order.give_back(second)
    assert order.startable() == [third]


def test_a_waiting_group_reserves_its_members():
    order = TicketOrder()
    single = order.draw({1})
    assert order.startable() == [single]
    group, later = order.draw({0, 1}), order.draw({0})
    assert order.startable() == [], "rank 0 is idle, but reserved by the group that came first"
    order.give_back(single)
    assert order.startable() == [group]
    order.give_back(group)
    assert order.startable() == [later]


def test_a_ticket_given_back_before_its_turn_frees_its_reservation():
    order = TicketOrder()
    order.draw({0, 1})
    order.startable()
    group, single = order.draw({1, 2}), order.draw({2})
    assert order.startable() == []
    order.give_back(group)
    assert order.startable() == [single]


@given(st.lists(st.sampled_from([(0, 1), (1, 2), (1,), (0,), (2,), (0, 1, 2)]), max_size=40), st.randoms())
def test_i3_overlapping_groups_see_one_order_and_nobody_starves(groups: list[tuple[int, ...]], random: Random):
    """Any order of submission and of endings: no rank runs two steps, all ranks see tickets in order, everything ends."""
    order = TicketOrder()
    tickets = {}
    running: list[int] = []
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    pending = list(groups)
    while pending or running or len(tickets) > sum(len(s) > 0 for s in seen.values()):
        if pending and (not running or random.random() < 0.5):
            members = pending.pop()
            tickets[order.draw(members)] = members
        elif running:
            order.give_back(running.pop(random.randrange(len(running))))
        for ticket in order.startable():
            running.append(ticket)
            for rank in tickets[ticket]:
                seen[rank].append(ticket)
        busy = [rank for ticket in running for rank in tickets[ticket]]
        assert len(busy) == len(set(busy))
        if not pending and not running:
            break
    assert all(ran == sorted(ran) for ran in seen.values())
    assert {ticket for ran in seen.values() for ticket in ran} == set(tickets)


async def test_a_cancelled_wait_lets_the_next_one_through():
    dispatcher = Dispatcher()
    entered: list[str] = []

    async def step(name: str, members: tuple[int, ...], leave: asyncio.Event) -> None:
        async with dispatcher.turn(members):
            entered.append(name)
            await leave.wait()

    leave = asyncio.Event()
    first = asyncio.create_task(step("first", (0, 1), leave))
    waiting = asyncio.create_task(step("waiting", (1, 2), leave))
    last = asyncio.create_task(step("last", (2,), leave))
    await asyncio.sleep(0)
    assert entered == ["first"]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    leave.set()
    await asyncio.gather(first, last)
    assert entered == ["first", "last"]


async def test_tickets_grow_over_the_whole_cluster():
    dispatcher = Dispatcher()
    async with dispatcher.turn((0,)) as first, dispatcher.turn((1,)) as second:
        assert second > first
    async with dispatcher.turn((0,)) as third:
        assert third > second
