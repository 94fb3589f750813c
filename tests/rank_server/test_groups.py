"""The groups of one rank: who opens them, what they are told, what has been exchanged, and how they are left."""

import pytest

from cp_wire.errors import ConfigRefused
from rank_server.collectives.solo import SoloGroup
from rank_server.groups import Groups
from rank_server.place import Place
from rank_server.sequences import PlanRefused
from tests.inproc import Shape

RANKS = [0, 1]


class Scripted:
    """A group that counts what it is told to have done."""

    def __init__(self, name):
        self.name = name
        self.calls, self.seconds = 3, 0.5
        self.timeout = None
        self.closed = 0

    def set_timeout(self, seconds):
        self.timeout = seconds

    def close(self):
        self.closed += 1


class ScriptedBackend:
    """Opens groups without anybody else."""

    def prepare(self, name, ranks):
        return f"{name} {ranks}".encode()

    def open(self, name, ranks, rank, bootstrap, timeout_s):
        return Scripted(name)


def absent():
    raise ValueError("no such library here")


@pytest.fixture
def groups():
    return Groups({"scripted": ScriptedBackend, "absent": absent})


@pytest.fixture
def place(files):
    """Of the first of four ranks: heads over two, prompts over two, and a cache of each pair's own."""
    return Place.of(Shape(tp=2, pcp=2).config(), 0, files.shape)


@pytest.fixture
def joined(groups, place):
    """Two open groups, with the names of this place's."""
    groups.choose("scripted", place)
    for kind in ("tp", "pcp"):
        groups.join(place.group_name(kind), RANKS, 0, b"", 1.0)
    return groups


def test_a_backend_that_is_unknown_or_not_here_is_refused(groups, place):
    with pytest.raises(ConfigRefused, match="collectives 'other' is not one of scripted, absent"):
        groups.choose("other", place)
    with pytest.raises(ConfigRefused, match="no such library here"):
        groups.choose("absent", place)


def test_nothing_is_prepared_or_opened_before_a_backend_is_chosen(groups, place):
    with pytest.raises(PlanRefused, match="not configured yet"):
        groups.prepare("pcp:0", RANKS)
    with pytest.raises(PlanRefused, match="not configured yet"):
        groups.join("pcp:0", RANKS, 0, b"", 1.0)
    groups.choose("scripted", place)
    assert groups.prepare("pcp:0", RANKS) == b"pcp:0 [0, 1]"


def test_a_rank_that_is_a_set_of_its_own_needs_no_backend(groups, place, files):
    alone = Place.of(Shape().config(), 0, files.shape)
    groups.choose("scripted", place)
    groups.choose("absent", alone)
    with pytest.raises(PlanRefused, match="alone in its set"):
        groups.prepare("pcp:0", RANKS)


def test_a_group_is_found_by_its_name_and_by_its_kind(joined, place):
    found = joined.of("pcp", place)
    assert isinstance(found, Scripted) and joined.named(found.name) is found
    assert joined.of("tp", place) is not found
    assert isinstance(joined.of("dcp", place), SoloGroup)


def test_a_group_that_is_not_open_is_refused(groups, place):
    groups.choose("scripted", place)
    name = place.group_name("pcp")
    with pytest.raises(PlanRefused, match=f"group {name} of 2 ranks is not open"):
        groups.of("pcp", place)
    with pytest.raises(PlanRefused, match=f"group {name} is not open"):
        groups.named(name)


def test_all_open_groups_have_the_timeout_and_are_counted(joined, place):
    joined.set_timeout(7.5)
    assert {joined.of(kind, place).timeout for kind in ("tp", "pcp")} == {7.5}
    assert joined.exchanged == (6, 1.0)


def test_closed_groups_keep_their_names_until_they_are_forgotten(joined, place):
    left = [joined.of(kind, place) for kind in ("tp", "pcp")]
    joined.close()
    with pytest.raises(PlanRefused, match="is open already"):
        joined.join(left[0].name, RANKS, 0, b"", 1.0)
    joined.forget()
    assert [group.closed for group in left] == [2, 2]
    assert joined.exchanged == (0, 0)
    joined.join(left[0].name, RANKS, 0, b"", 1.0)
    assert joined.named(left[0].name) is not left[0]
