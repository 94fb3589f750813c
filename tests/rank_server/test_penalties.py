"""Penalties against plain Python and against the reference processor, however the tokens arrive."""

import itertools
import random

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from rank_server.penalties import TokenHistory

VOCAB = 30
CPU = torch.device("cpu")


def history_of(tokens, num_prompt, cuts=(), repetition=1.0, presence=0.0, frequency=0.0):
    history = TokenHistory(repetition, presence, frequency, num_prompt, VOCAB, CPU)
    edges = [0, *cuts, len(tokens)]
    for first, last in itertools.pairwise(edges):
        history.take(first, torch.tensor(tokens[first:last], dtype=torch.int64))
    return history


def plain(logits, tokens, num_prompt, repetition, presence, frequency):
    output = tokens[num_prompt:]
    result = []
    for token, logit in enumerate(logits):
        if token in tokens:
            logit = logit / repetition if logit > 0 else logit * repetition
        result.append(logit - frequency * output.count(token) - presence * (token in output))
    return result


def test_penalties_equal_the_plain_definition_in_any_cut():
    random_ = random.Random(5)
    for _ in range(100):
        tokens = [random_.randrange(VOCAB) for _ in range(random_.randrange(1, 60))]
        num_prompt = random_.randrange(1, len(tokens) + 1)
        cuts = sorted(random_.sample(range(len(tokens) + 1), min(3, len(tokens))))
        numbers = {
            "repetition": random_.choice([1.0, 0.5, 1.5]),
            "presence": random_.choice([0.0, -1.0, 0.5]),
            "frequency": random_.choice([0.0, 0.25, -2.0]),
        }
        logits = torch.tensor([random_.gauss(0, 3) for _ in range(VOCAB)])
        before = logits.tolist()
        got = history_of(tokens, num_prompt, cuts, **numbers).penalised(logits)
        assert got.tolist() == pytest.approx(plain(before, tokens, num_prompt, **numbers), abs=1e-5)
        assert logits.tolist() == before


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_equals_the_reference_to_the_bit(penalty):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (1, 12), generator=generator)
    logits = 4 * torch.randn(1, VOCAB, generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())[0]
    got = history_of(tokens[0].tolist(), 7, repetition=penalty).penalised(logits[0])
    assert torch.equal(got, expected)


def test_presence_and_frequency_look_at_the_output_alone():
    logits = torch.zeros(VOCAB)
    got = history_of([1, 1, 2, 3, 3, 1], 3, presence=1.0, frequency=0.5).penalised(logits)
    assert {token: value for token, value in enumerate(got.tolist()) if value} == {3: -2.0, 1: -1.5}


def test_minus_infinity_stays():
    logits = torch.full((VOCAB,), -torch.inf)
    got = history_of([1, 2, 2], 1, repetition=0.5, presence=-2.0, frequency=-2.0).penalised(logits)
    assert torch.equal(got, logits)
