"""Small seeded checkpoints in both formats, written without the code under test."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_DIM = 8
SPECIALS = ("<pad>", "<s>", "</s>")
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")]

_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_weights(tied: bool = False, family: str = "llama") -> dict[str, np.ndarray]:
    """Seeded random weights of CONFIG's shape under Hugging Face names, and what the family adds."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (32, 32),
            prefix + "self_attn.k_proj.weight": (16, 32),
            prefix + "self_attn.v_proj.weight": (16, 32),
            prefix + "self_attn.o_proj.weight": (32, 32),
            prefix + "mlp.gate_proj.weight": (64, 32),
            prefix + "mlp.up_proj.weight": (64, 32),
            prefix + "mlp.down_proj.weight": (32, 64),
            prefix + "input_layernorm.weight": (32,),
            prefix + "post_attention_layernorm.weight": (32,),
        }
        if family == "qwen2":
            shapes |= {prefix + f"self_attn.{kind}_proj.bias": (32 if kind == "q" else 16,) for kind in "qkv"}
        if family == "qwen3":
            shapes |= {prefix + f"self_attn.{kind}_norm.weight": (HEAD_DIM,) for kind in "qk"}
    if not tied:
        shapes["lm_head.weight"] = (300, 32)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def vocabulary() -> list[str]:
    """Specials, the 256 byte characters, then the results of MERGES."""
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE over `vocabulary()` with three special tokens."""
    tokens = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def write_hf(directory: Path, config: dict[str, Any] | None = None, weights: dict[str, np.ndarray] | None = None) -> Path:
    """A single-file checkpoint with tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tiny_weights() if weights is None else weights, directory / "model.safetensors")
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def write_sharded(directory: Path, weights: dict[str, np.ndarray] | None = None) -> Path:
    """The same in three shards with an index."""
    weights = tiny_weights() if weights is None else weights
    write_hf(directory, weights={})
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(3):
        name = f"model-{shard + 1:05}-of-00003.safetensors"
        part = {key: weights[key] for key in sorted(weights)[shard::3]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def rewrite_header(path: Path, change: dict[str, Any] | bytes) -> None:
    """Replace entries of a safetensors header (or the whole header) and keep the data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change if isinstance(change, bytes) else json.dumps(json.loads(content[8 : 8 + length]) | change).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def gguf_row_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face q/k rows as GGUF keeps them, row by row: pair i of a head side by side."""
    head_dim = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(head_dim // 2):
            for half in range(2):
                out[head * head_dim + 2 * pair + half] = rows[head * head_dim + half * (head_dim // 2) + pair]
    return out


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray] | None = None,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    settings: dict[str, Any] | None = None,
    family: str = "llama",
) -> Path:
    """A GGUF file of CONFIG's shape; `settings` replaces metadata (None leaves an entry out)."""
    values: dict[str, Any] = {
        f"{family}.block_count": 2,
        f"{family}.context_length": 256,
        f"{family}.embedding_length": 32,
        f"{family}.feed_forward_length": 64,
        f"{family}.attention.head_count": 4,
        f"{family}.attention.head_count_kv": 2,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 5000.0,
        f"{family}.rope.dimension_count": HEAD_DIM,
        f"{family}.vocab_size": 300,
        "general.name": "Tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in vocabulary()],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
    } | (settings or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", family))
    for key, value in values.items():
        _add(writer, key, value)
    for name, array in (tiny_weights(family=family) if weights is None else weights).items():
        _add_tensor(writer, name, array, matrices, family == "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, matrices: GGMLQuantizationType, pairs_rows: bool
) -> None:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        target = f"blk.{layer}.{_GGUF_LAYER.get(part, part)}"
    else:
        target = _GGUF_WHOLE.get(stem, stem)
    if pairs_rows and stem.endswith("q_proj"):
        array = gguf_row_order(array, 4)
    if pairs_rows and stem.endswith("k_proj"):
        array = gguf_row_order(array, 2)
    kind = matrices if array.ndim == 2 else GGMLQuantizationType.F32
    writer.add_tensor(f"{target}.{suffix}", quantize(array, kind), raw_dtype=kind)
