import pytest

from coordinator.prefix_cache import NO_HIT, Hit, PrefixCache

A, B, C, D = b"a", b"b", b"c", b"d"


def filled(units_per_virtual_block: int = 1) -> PrefixCache:
    """Units a, b, c, d of one chain, one block each, alternating between two members."""
    cache = PrefixCache(units_per_virtual_block)
    for index, digest in enumerate((A, B, C, D)):
        assert cache.insert(digest, 0, ((index % 2, index // 2),))
    return cache


def test_the_longest_prefix_of_the_chain_is_found():
    cache = filled()
    assert cache.longest([A, B, C, D]).units == (((0, 0),), ((1, 0),), ((0, 1),), ((1, 1),))
    assert cache.longest([A, B]).units == (((0, 0),), ((1, 0),))
    assert cache.longest([A, b"x", C]).units == (((0, 0),),)
    assert cache.longest([b"x", B]) == NO_HIT
    assert cache.longest([]) == NO_HIT


def test_a_lazy_chain_is_asked_no_further_than_the_first_missing_unit():
    asked = []

    def chain():
        for digest in (A, b"x", C):
            asked.append(digest)
            yield digest

    filled().longest(chain())
    assert asked == [A, b"x"]


def test_f1_a_hit_is_made_of_whole_virtual_blocks():
    cache = filled(units_per_virtual_block=2)
    assert len(cache.longest([A, B, C, D]).units) == 4
    assert len(cache.longest([A, B, C]).units) == 2
    assert cache.longest([A]) == NO_HIT


@pytest.mark.parametrize("order", [(A, B, C, D), (D, C, B, A), (B, A, D, C)])
def test_f4_nothing_is_reached_behind_a_missing_unit(order):
    cache = filled()
    places = {A: (0, 0), B: (1, 0), C: (0, 1), D: (1, 1)}
    gone = set()
    for digest in order:
        assert cache.forget(places[digest]) == ()
        gone.add(digest)
        reach = next((i for i, each in enumerate((A, B, C, D)) if each in gone), 4)
        assert len(cache.longest([A, B, C, D]).units) == reach
    assert len(cache) == 0


def test_f5_a_unit_is_valid_only_with_all_its_blocks():
    cache = PrefixCache(1)
    cache.insert(A, 1, ((0, 4), (1, 5), (2, 6)))
    cache.insert(B, 1, ((0, 7), (1, 8), (2, 9)))
    assert sorted(cache.forget((1, 8))) == [(0, 7), (2, 9)]
    assert cache.longest([A, B]) == Hit(1, (((0, 4), (1, 5), (2, 6)),))
    cache.insert(B, 1, ((0, 1), (1, 2), (2, 3)))
    with pytest.raises(KeyError):
        cache.forget((0, 7))


def test_a_unit_is_cached_once_per_offset():
    cache = PrefixCache(1)
    assert cache.insert(A, 0, ((0, 1),))
    assert not cache.insert(A, 0, ((0, 2),))
    assert cache.insert(A, 1, ((1, 3),))
    assert len(cache) == 2
    with pytest.raises(KeyError):
        cache.forget((0, 2))


def test_a_hit_stays_with_one_offset_even_where_another_goes_on():
    cache = PrefixCache(1)
    cache.insert(A, 0, ((0, 1),))
    cache.insert(B, 1, ((0, 2),))
    assert cache.longest([A, B]) == Hit(0, (((0, 1),),))
    cache.insert(A, 1, ((1, 3),))
    assert cache.longest([A, B]) == Hit(1, (((1, 3),), ((0, 2),)))
    assert cache.longest([A]) == Hit(0, (((0, 1),),))


def test_an_offset_that_ends_inside_a_virtual_block_does_not_shorten_the_hit_of_another():
    cache = filled(units_per_virtual_block=2)
    cache.insert(A, 1, ((1, 7),))
    cache.insert(B, 1, ((0, 7),))
    cache.insert(C, 1, ((1, 8),))
    cache.forget((1, 1))
    assert cache.longest([A, B, C, D]) == Hit(0, (((0, 0),), ((1, 0),)))
    cache.insert(D, 1, ((0, 8),))
    assert cache.longest([A, B, C, D]).shard_offset == 1
