"""Seeds: drawn ones that an operator can fix, and those of a request's completions."""

from coordinator.seeds import SeedSource, completion_seed


def test_drawn_seeds_repeat_only_when_they_are_told_to():
    fixed = [SeedSource(3) for _ in range(2)]
    first, second = ([source.draw() for _ in range(5)] for source in fixed)
    assert first == second
    assert len(set(first)) == 5
    assert SeedSource(None).draw() != SeedSource(None).draw()
    assert all(0 <= seed < 2**64 for seed in first)


def test_completion_0_draws_with_the_seed_of_the_request_and_the_others_with_their_own():
    assert completion_seed(2**64 - 1, 0) == 2**64 - 1
    seeds = [completion_seed(seed, index) for seed in range(50) for index in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_completion_seeds_are_the_documented_function():
    """Written out: a change of the function would change every seeded answer."""
    assert completion_seed(7, 1) == 6109438171450274641
