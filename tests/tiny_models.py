"""Small seeded checkpoints of every family, and what `transformers` computes in fp32: the oracle of the exactness tests."""

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_GAINS = {
    "embed_tokens": 0.4,
    "q_proj": 1.3,
    "q_b_proj": 1.3,
    "k_proj": 1.3,
    "v_proj": 1.5,
    "kv_b_proj": 1.5,
    "o_proj": 3.0,
    "gate": 2.0,
    "lm_head": 3.0,
}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY = 256 + 2, 256 + 2 + len(_LETTERS) ** 2


def build_tiny_llama(directory: Path, **shape: Any) -> Path:
    """`build_tiny_model` of the Llama family."""
    return build_tiny_model(directory, family="llama", **shape)


def build_tiny_model(
    directory: Path,
    *,
    family: str = "llama",
    hidden: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    layers: int = 2,
    vocab: int = 320,
    tie: bool = False,
    seed: int = 0,
    rope_theta: float = 100.0,
    rope: Mapping[str, Any] | None = None,
    max_position: int = 4096,
    shards: bool = False,
    mla: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a seeded random model with tokenizer and chat template into `directory` and returns it.

    Weights are scaled so that attention outweighs the residual stream and a short rotary period separates near positions:
    the likeliest next token depends on every earlier token, its place and every KV head. Norms are not 1 and biases not 0.
    family: a `model_type` of `model_files.families`; head_dim: hidden / heads unless given; rope: settings beside the base;
    mla: settings of latent attention and experts that differ from `_latent_settings`; kv_heads does not count there then;
    vocab: 258 … 934 (256 bytes, pairs of letters, two specials); shards: split over several safetensors files.
    """
    latent = family.startswith("deepseek")
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else kv_heads,
        **({} if latent else {"head_dim": head_dim or hidden // heads}),
        vocab_size=vocab,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta} | dict(rope or {}),
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie,
        bos_token_id=vocab - 2,
        eos_token_id=vocab - 1,
        **({"sliding_window": None} if family == "mistral" else {}),
        **(_latent_settings(family, **dict(mla or {})) if latent else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _fill(name, weight)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.3)
    if shards:
        model.save_pretrained(directory, max_shard_size="64KB")
    else:
        model.save_pretrained(directory)
    _tokenizer(vocab).save(str(directory / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": False, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _latent_settings(family: str, **changed: Any) -> dict[str, Any]:
    """Latents of 16 + 4, first layer dense, 8 experts in two groups; V2 takes groups where `topk_method` says so."""
    settings = {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.3,
        "n_group": 4,
        "topk_group": 2,
    }
    if family == "deepseek_v3":
        settings["num_mtp_layers"] = 0
    return settings | changed


def greedy_reference(directory: Path, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The n likeliest next tokens one after the other, each from the whole sequence anew (no cache whose faults could hide).

    Ties go to the lowest id; end-of-sequence is a token like any other.
    """
    return list(_greedy(directory, tuple(prompt_ids), n))


def logits_reference(directory: Path, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocabulary] fp32 logits after each token."""
    with torch.inference_mode():
        return _reference(directory)(torch.tensor([list(ids)])).logits[0]


@cache
def _greedy(directory: Path, prompt_ids: tuple[int, ...], n: int) -> tuple[int, ...]:
    if n == 0:
        return ()
    earlier = _greedy(directory, prompt_ids, n - 1)
    with torch.inference_mode():
        logits = _reference(directory)(torch.tensor([[*prompt_ids, *earlier]]), logits_to_keep=1).logits
    return (*earlier, int(logits[0, -1].argmax()))


@cache
def _reference(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def _fill(name: str, weight: Tensor) -> None:
    """Random values in place; a matrix turns inputs of unit variance into outputs whose deviation is the gain."""
    kind = name.split(".")[-2]
    gain = _GAINS.get(kind, 1.0)
    if name.endswith(".bias"):
        weight.normal_(0.0, 0.7)
        return
    if weight.dim() == 1:
        weight.uniform_(0.5, 1.5)
        return
    fan_in = 1 if kind == "embed_tokens" else weight.shape[-1]
    weight.normal_(0.0, gain * fan_in**-0.5)


def _tokenizer(vocab: int) -> Tokenizer:
    if not _SMALLEST_VOCABULARY <= vocab <= _LARGEST_VOCABULARY:
        raise ValueError(f"a tiny vocabulary has {_SMALLEST_VOCABULARY} to {_LARGEST_VOCABULARY} tokens, not {vocab}")
    pairs = list(itertools.product(_LETTERS, repeat=2))[: vocab - _SMALLEST_VOCABULARY]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer
