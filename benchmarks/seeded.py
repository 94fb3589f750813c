"""Models with seeded random weights, as Hugging Face directories: what they say means nothing, what they cost does."""

from pathlib import Path
from typing import Any

import torch


def write(directory: Path, family: str, **settings: Any) -> Path:
    """Writes a bf16 model of a `model_type` of transformers, and a tokenizer of single bytes; returns the directory.

    Token ids from 256 on are fine as input and stand for no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **settings)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
