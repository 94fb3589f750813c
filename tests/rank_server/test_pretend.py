"""A rank's whole step as on a GPU: nothing of it may meet a tensor in host memory."""

import pytest
import torch

from cp_wire.pb import common_pb2, rank_pb2
from model_files import open_model
from rank_server.attention.gpu import GpuKernels
from rank_server.attention.kernels import KERNELS
from tests.rank_server.pretend import PretendGpu
from tests.rank_server.ranks import BLOCKS, Rank, config, plan, row

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
GPU = torch.device("cuda", 0)


def test_mixing_is_an_error_and_what_torch_allows_is_not():
    with PretendGpu(GPU) as pretend:
        there, here = torch.zeros(3, device=GPU), torch.ones(3)
        assert (there.device, here.device, (there + 1).device, there.new_zeros(2).device) == (GPU, here.device, GPU, GPU)
        assert (there.cpu().device.type, there.device, here.to(GPU).device, here.device.type) == ("cpu", GPU, GPU, "cpu")
        assert there[here.long()].device == torch.arange(3, device=there.device).device == GPU
        assert (there + torch.tensor(2.0)).device == there.copy_(here).device == GPU
        with pytest.raises(RuntimeError, match="tensors on cuda:0 and in host memory"):
            torch.cat([there, here])
        assert pretend.made == 2


def sampled(files, device):
    """Two requests through prefill and decode, with everything that a draw can ask for; tokens of each step."""
    ready = Rank(files)
    executor = ready.executor
    executor.configure(config(device=device), 0)
    executor.allocate_pool(BLOCKS)
    first, last = (
        plan(row(1, 0, [5, 6, 7, 8, 9], [0, 1]), row(2, 0, [3], [2])),
        plan(row(1, 5, [4], output_index=1), row(2, 1, [2])),
    )
    asked = common_pb2.SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        seed=3,
        top_logprobs=2,
        logprobs=True,
        prompt_logprobs=1,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        bias_token_ids=[1, 7],
        biases=[1.0, -2.0],
        stop_token_ids=[0],
    )
    first.admitted.append(rank_pb2.AdmittedRequest(handle=1, sampling=asked, num_prompt_tokens=5))
    first.admitted.append(rank_pb2.AdmittedRequest(handle=2))
    first.rows[0].ban_stop = True
    first.rows[0].score_start = 1
    first.rows[0].score_token_ids.extend([6, 7, 8, 9])
    return [executor.step(step) for step in (first, last)]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"family": "qwen2"},
        {"family": "qwen3", "rope": YARN},
        {"family": "deepseek_v2"},
        {"family": "deepseek_v3", "mla": {"q_lora_rank": 24}, "rope": YARN},
    ],
    ids=lambda model: model.get("family", "llama"),
)
def test_a_step_keeps_to_the_device(tiny, monkeypatch, model):
    files = open_model(tiny(**model))
    wanted = sampled(files, "cpu")
    monkeypatch.setattr("rank_server.place.claim", lambda name, rank: GPU)
    monkeypatch.setattr("rank_server.executor.free_bytes", lambda device: 1 << 40)
    monkeypatch.setitem(KERNELS, "cuda", lambda device: GpuKernels(8, use_triton=False))
    with PretendGpu(GPU) as pretend:
        got = sampled(files, "cuda")
    assert pretend.made > 20
    for one, other in zip(got, wanted, strict=True):
        assert [each.token_id for each in one.sampled] == [each.token_id for each in other.sampled]
        assert [len(each.positions) for each in one.scores] == [len(each.positions) for each in other.scores]
