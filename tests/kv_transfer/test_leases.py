"""Leases end once, are reported once, and are never read after their end."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cp_wire.errors import KvloomError, LeaseEnded, Stale, Unknown
from kv_transfer import leases as module
from kv_transfer.generations import Generations
from kv_transfer.leases import Ended, LeaseTable
from tests.kv_transfer.cluster import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def generations() -> Generations:
    made = Generations(10)
    made.stamp([1, 2, 3])
    return made


@pytest.fixture
def table(clock: Clock, generations: Generations) -> LeaseTable:
    made = LeaseTable(generations, clock, 10)
    made.grant(7, 1, 0, [1, 2], 20, {0, 4})
    return made


def test_h12_the_last_reader_ends_it_once(table: LeaseTable) -> None:
    table.release(7, 0)
    table.release(7, 0)
    table.release(7, 9)
    assert table.take_ended() == [] and table.get(7).readers == {4}
    table.release(7, 4)
    table.release(7, 4)
    assert table.take_ended() == [Ended(7, "released", (1, 2))]
    assert table.take_ended() == []
    with pytest.raises(LeaseEnded, match="lease of transfer 7 is released"):
        table.get(7)


def test_h5_ends_in_every_order_end_it_once(table: LeaseTable, clock: Clock) -> None:
    table.cancel(7)
    table.cancel(7)
    table.release(7, 0)
    clock.now += 10
    assert table.take_ended() == [Ended(7, "cancelled", (1, 2))]
    assert table.take_ended() == []
    table.cancel(8)
    table.release(8, 0)


def test_a_session_without_readers_ends_at_once(table: LeaseTable) -> None:
    table.grant(8, 1, 0, [3], 4, set())
    assert table.take_ended() == [Ended(8, "released", (3,))]


def test_renewal_counts_from_now(table: LeaseTable, clock: Clock) -> None:
    clock.now += 9
    table.renew(7)
    clock.now += 9.9
    assert table.get(7).session == 7
    clock.now += 0.1
    with pytest.raises(LeaseEnded, match="expired"):
        table.renew(7)
    assert table.take_ended() == [Ended(7, "expired", (1, 2))]


def test_h9_expiry_needs_nobody_to_ask_for_the_session(table: LeaseTable, clock: Clock) -> None:
    clock.now += 10
    assert [ended.how for ended in table.take_ended()] == ["expired"]
    assert table.active == 0


def test_it_grows_and_never_shrinks(table: LeaseTable, clock: Clock) -> None:
    clock.now += 9
    table.extend(7, [3], 30)
    clock.now += 9
    lease = table.get(7)
    assert (lease.tokens, lease.blocks.tolist()) == (30, [1, 2, 3])
    with pytest.raises(Stale, match="cannot shrink to 29"):
        table.extend(7, [], 29)
    table.cancel(7)
    assert table.take_ended() == [Ended(7, "cancelled", (1, 2, 3))]


def test_h1_a_block_with_a_new_owner_makes_it_unreadable(table: LeaseTable, generations: Generations) -> None:
    generations.stamp([3])
    table.get(7)
    generations.stamp([2])
    for ask in (table.get, table.renew, lambda session: table.extend(session, [3], 30)):
        with pytest.raises(Stale, match="handed out again"):
            ask(7)


def test_a_session_is_granted_once(table: LeaseTable) -> None:
    with pytest.raises(Stale, match="granted before"):
        table.grant(7, 2, 0, [3], 4, {0})
    table.cancel(7)
    with pytest.raises(Stale, match="granted before"):
        table.grant(7, 2, 0, [3], 4, {0})


def test_unknown_sessions(table: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unknown, match="transfer 8 is not known"):
        table.get(8)
    monkeypatch.setattr(module, "REMEMBERED", 1)
    table.grant(8, 1, 0, [3], 4, {0})
    table.cancel_all()
    with pytest.raises(Unknown):
        table.get(7)
    with pytest.raises(LeaseEnded):
        table.get(8)


def test_a_lease_must_last(generations: Generations) -> None:
    with pytest.raises(ValueError, match="never holds"):
        LeaseTable(generations, Clock(), 0)


class Life(RuleBasedStateMachine):
    """Whatever is called in whatever order: a session's blocks are free after its one report, and not readable any more."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.generations = Generations(100)
        self.table = LeaseTable(self.generations, self.clock, 5)
        self.granted: dict[int, set[int]] = {}
        self.reported: set[int] = set()

    @rule(readers=st.sets(st.integers(0, 2)), blocks=st.integers(0, 3))
    def grant(self, readers: set[int], blocks: int) -> None:
        session = len(self.granted)
        held = range(session * 3 % 97, session * 3 % 97 + blocks)
        self.generations.stamp(held)
        self.granted[session] = readers
        self.table.grant(session, 0, 0, held, 9, readers)

    @rule(session=st.integers(0, 9), reader=st.integers(0, 2))
    def release(self, session: int, reader: int) -> None:
        self.table.release(session, reader)

    @rule(session=st.integers(0, 9))
    def renew(self, session: int) -> None:
        try:
            self.table.renew(session)
        except KvloomError:
            return
        assert session not in self.reported

    @rule(session=st.integers(0, 9))
    def cancel(self, session: int) -> None:
        self.table.cancel(session)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def report(self) -> None:
        for ended in self.table.take_ended():
            assert ended.session not in self.reported
            self.reported.add(ended.session)

    @invariant()
    def every_session_is_active_or_ends(self) -> None:
        self.report()
        assert self.table.active == len(self.granted) - len(self.reported)


TestLife = Life.TestCase
