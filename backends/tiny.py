"""A random small model with a tokenizer of its own, for machines without GPUs or downloads."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.environment import prepare, require

SPECIAL = ("<pad>", "<eos>", "<unk>")
"""Special tokens; their numbers are 0, 1, 2."""
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Characters of the tokenizer, one token each."""
HEAD_SIZE = 64
"""Size of an attention head; vLLM's CPU attention wants a multiple of 32."""
MAX_TOKENS = 4096
"""Longest context."""
WEIGHT_STD = 0.08
"""Spread of inner weights (chosen): with hidden size 256 a layer neither dies out nor drowns the one before, so that
the output depends on the whole context."""
HEAD_STD = 0.16
"""Spread of the output head (chosen): logits spread by 0.16 * sqrt(hidden), about 2.5, so that greedy decoding wanders,
sampling takes many tokens and every context ends with a probability of the order of 1 / vocabulary."""


def make_tiny(folder: Path, *, seed: int, layers: int = 4, hidden: int = 256) -> Path:
    """Write a Qwen2 model (2.4 million parameters by default, float32) and its tokenizer to `folder`; returns it.

    The same arguments give the same weights. Loads like any Hugging Face folder, offline. Raises InputError where
    transformers is missing.
    """
    prepare("cpu")
    require("transformers")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers=layers, hidden=hidden, heads=hidden // HEAD_SIZE)
    draw_weights(model, seed, WEIGHT_STD, {"model.embed_tokens.weight": 1.0, "lm_head.weight": HEAD_STD})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_model(tokenizer: Any, *, layers: int, hidden: int, heads: int) -> Any:
    """A Qwen2 model in float32 for `make_tokenizer`'s tokens, its weights still to be drawn."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def draw_weights(model: Any, seed: int, std: float, std_of: Mapping[str, float]) -> None:
    """Draw all weights but those of norms from normal distributions: of spread `std`, or what `std_of` says by name."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" not in name:
                weight.normal_(0, std_of.get(name, std), generator=random)


def make_tokenizer() -> Any:
    """One token a character, in the byte-level form (space is Ġ) to which transformers turns any tokenizer of Qwen2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [byte_level.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *names))}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=SPECIAL[2]))
    characters.pre_tokenizer = byte_level
    characters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[2]
    )
