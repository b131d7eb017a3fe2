"""The shape of a dense decoder, read from a Hugging Face config.json, and what follows from it: counts and bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhfless.errors import InfeasibleError, InputError

BYTES_PER_VALUE = 2
"""Of weights, activations and KV: bf16 (or fp16), as the paper trains and samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model_type implies without saying so in its config."""

    qkv_bias: bool
    """The query, key and value projections carry a bias."""
    qk_norm: bool
    """Queries and keys are normalised per head: two weight vectors of head_dim a layer."""


_FAMILIES = {
    "llama": _Family(qkv_bias=False, qk_norm=False),
    "qwen2": _Family(qkv_bias=True, qk_norm=False),
    "qwen3": _Family(qkv_bias=False, qk_norm=True),
}
"""Architectures whose weights are counted here, as Hugging Face transformers builds them."""

_LARGEST_COUNT = 10**9
"""Largest number that a config may hold (chosen: beyond every model, and products stay within a float)."""

_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "kv_lora_rank")
"""Fields that only mixture-of-experts or latent-attention configs carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP in every layer."""

    key: str
    """Short name, the first part of a profile's name."""
    name: str
    """Hugging Face name, where the config says it."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads: fewer than query heads under grouped-query attention."""
    head_dim: int
    """Width of one head."""
    intermediate: int
    """Width of the gated MLP."""
    vocab: int
    """Rows of the embedding."""
    tied: bool
    """The output head shares the embedding's weights."""
    bias_per_layer: int
    """Bias values of one layer."""
    norm_per_layer: int
    """Normalisation weights of one layer."""
    max_positions: int
    """Longest context that the position embedding was trained for; 0 where the config does not say."""

    @property
    def matrix_per_layer(self) -> int:
        """Weights of one layer's seven matrices."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * query + 2 * kv + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """Every weight, counted once; equal to the count of the published checkpoint."""
        layer = self.matrix_per_layer + self.bias_per_layer + self.norm_per_layer
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of one copy of the weights."""
        return self.parameters * BYTES_PER_VALUE

    def kv_bytes_per_token(self, tp: int) -> int:
        """Bytes of one token's keys and values over `tp` ranks: a rank without a KV head of its own holds a copy."""
        return 2 * self.layers * max(self.kv_heads, tp) * self.head_dim * BYTES_PER_VALUE

    def require_split(self, tp: int) -> None:
        """Raise InputError for tp < 1, InfeasibleError unless heads, MLP and vocabulary split over `tp` ranks."""
        if tp < 1:
            raise InputError(f"tensor-parallel size {tp}: it must be at least 1")
        for count, what in ((self.heads, "attention heads"), (self.intermediate, "MLP columns")):
            if count % tp:
                raise InfeasibleError(f"{self.name}: {count} {what} do not split over tp {tp}; take a divisor")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise InfeasibleError(
                f"{self.name}: {self.kv_heads} KV heads neither split over nor repeat on tp {tp}; "
                "take a divisor or a multiple"
            )


def read_shape(path: Path) -> ModelShape:
    """The model of the config.json at `path`. Raises InputError if it cannot be read, as `parse_shape` otherwise."""
    if not path.name:
        raise InputError("the name of the model config is empty; give the path of a config.json")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the model config ({error.strerror})") from None
    key = path.resolve().parent.name if path.stem == "config" else path.stem
    return parse_shape(text, key.lower(), str(path))


def parse_shape(text: str | bytes, key: str, where: str) -> ModelShape:
    """The model that a config.json's `text` describes.

    Raises InputError, naming `where`: not JSON, a missing or impossible field, quantised weights, or a model that is
    not a dense decoder of a known family.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{where}: a model config is a JSON object, not {type(config).__name__}")
    for name in _NOT_DENSE:
        if config.get(name):
            raise InputError(f"{where}: {name} = {config[name]!r}; only dense decoders are counted, not this kind")
    if config.get("quantization_config"):
        raise InputError(f"{where}: quantised weights; only 16-bit models are counted")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(_FAMILIES)
        raise InputError(f"{where}: model_type {config.get('model_type')!r} is not known; known are {known}")
    hidden, heads = _count(config, "hidden_size", where), _count(config, "num_attention_heads", where)
    kv_heads = _count(config, "num_key_value_heads", where)
    intermediate = _count(config, "intermediate_size", where)
    if heads % kv_heads:
        raise InputError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim", where)
    elif hidden % heads:
        raise InputError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; give head_dim")
    else:
        head_dim = hidden // heads
    bias = (heads + 2 * kv_heads) * head_dim if family.qkv_bias or config.get("attention_bias") else 0
    if config.get("attention_bias"):
        bias += hidden
    if config.get("mlp_bias"):
        bias += 2 * intermediate + hidden
    return ModelShape(
        key=key,
        name=str(config.get("_name_or_path") or key),
        layers=_count(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=_count(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),  # what transformers assumes for these families
        bias_per_layer=bias,
        norm_per_layer=2 * hidden + (2 * head_dim if family.qk_norm else 0),
        max_positions=_count(config, "max_position_embeddings", where) if "max_position_embeddings" in config else 0,
    )


def _count(config: Mapping[str, object], name: str, where: str) -> int:
    if name not in config:
        raise InputError(f"{where}: {name} is missing")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_COUNT:
        raise InputError(f"{where}: {name} = {value!r}; it must be a whole number from 1 to {_LARGEST_COUNT}")
    return value
