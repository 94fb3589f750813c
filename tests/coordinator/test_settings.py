"""The effective configuration."""

from types import SimpleNamespace

import pytest

from coordinator.settings import effective_config
from cp_layout.errors import LayoutError
from cp_wire import errors
from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import common_pb2
from tests.coordinator.harness import SHAPE

MODEL = SimpleNamespace(shape=SHAPE, hash="abc", name="tiny")


def asked(**changes: object) -> common_pb2.ClusterConfig:
    values = {
        "tp": 1,
        "pcp": 1,
        "dcp": 1,
        "dp": 1,
        "block_size": 16,
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "collectives": "auto",
    }
    return common_pb2.ClusterConfig(**(values | changes))


def test_j5_what_was_left_open_is_settled_once():
    request = asked()
    config = effective_config(request, MODEL)
    assert (config.interleave, config.dtype, config.kv_cache_dtype, config.collectives) == (16, "float32", "float32", "gloo")
    assert (config.max_model_len, config.model_hash, config.model_name, config.protocol_version) == (
        4096,
        "abc",
        "tiny",
        PROTOCOL_VERSION,
    )
    assert config.pcp_gather == config.mla_gather == "auto"
    assert request.interleave == 0, "the argument is not touched"


def test_j5_what_was_asked_for_is_kept():
    config = effective_config(asked(interleave=4, dtype="bfloat16", kv_cache_dtype="float16", max_model_len=77), MODEL)
    assert (config.interleave, config.dtype, config.kv_cache_dtype, config.max_model_len) == (4, "bfloat16", "float16", 77)
    assert effective_config(asked(pcp=2, dcp=2, pcp_gather="q"), MODEL).pcp_gather == "q"
    assert effective_config(asked(dtype="bfloat16"), MODEL).kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"tp": 3}, "2 Q heads.*tp 3"),
        ({"pcp": 2, "dcp": 2, "interleave": 5}, "5.*16"),
        ({"pcp": 2, "dcp": 3}, "dcp 3.*pcp 2"),
        ({"kv_cache_tokens_per_rank": 15}, "15 tokens.*16"),
        ({"max_model_len": 4097}, "4097.*4096"),
        ({"dtype": "int8"}, "int8"),
        ({"pcp": 2, "pcp_gather": "q"}, "pcp_gather q with pcp 2.*dcp 1"),
        ({"pcp": 2, "dcp": 2, "pcp_gather": "both"}, "'both' is not one of auto, q, kv"),
        ({"tp": 2, "mla_gather": "kv"}, "--mla-gather kv is for latent attention"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8"),
    ],
)
def test_j2_broken_laws_are_refused_with_their_numbers(changes, numbers):
    with pytest.raises((LayoutError, errors.ConfigRefused), match=numbers):
        effective_config(asked(**changes), MODEL)
