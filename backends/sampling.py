"""Sampling that does not depend on where a response is decoded.

The Gumbel-max trick: argmax over tokens of logit / T + g, with g independent standard Gumbel, draws from
softmax(logit / T). Here g is a pure function of (seed, absolute position, token): no generator state has to move with a
response, so one that goes on elsewhere continues exactly as if it had stayed. vLLM loads `PositionNoise` into its
workers and then decodes greedily.
"""

from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

SEED, TEMPERATURE = "noise_seed", "noise_temperature"
"""Keys of `SamplingParams.extra_args` by which a request asks for noise. vLLM's own temperature must then be 0."""

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea, Flood 2014), a counter-based generator that passes BigCrush."""
_CHUNK = 1 << 22
"""Elements (rows * vocabulary) whose noise is made at once: 32 MiB an int64 temporary (chosen), which fits into what
an engine leaves free on its device."""


def noise_args(seed: int, temperature: float) -> dict[str, Any]:
    """`extra_args` of a request that samples at `temperature` > 0 from the stream `seed` (any int)."""
    return {SEED: seed, TEMPERATURE: temperature}


def stream_key(seed: int, position: int) -> int:
    """Where the noise of one token begins in the generator's sequence, a signed 64-bit number."""
    key = _mix((_mix(seed & _WORD) + _GOLDEN * (position + 1)) & _WORD)
    return key - (1 << 64) if key >> 63 else key


def gumbel(keys: torch.Tensor, size: int) -> torch.Tensor:
    """float64[rows, size]: standard Gumbel noise; `keys` is int64[rows], from `stream_key`.

    In float64, so that tokens far less likely than float32's 2**-24 still get their share.
    """
    counters = torch.arange(1, size + 1, dtype=torch.int64, device=keys.device).mul_(_signed(_GOLDEN))
    bits = keys.unsqueeze(1) + counters  # int64 wraps around, as the generator wants it
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits.bitwise_xor_(_shift_right(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shift_right(bits, 31))
    uniform = _shift_right(bits, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


class PositionNoise(LogitsProcessor):  # type: ignore[misc]
    """Adds keyed Gumbel noise to the rows of requests that ask for it; others stay as they are, greedy."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that vLLM would sample a second time, or whose temperature is not above 0."""
        extra = sampling_params.extra_args or {}
        if SEED not in extra:
            return
        if sampling_params.temperature != 0 or not extra.get(TEMPERATURE, 0) > 0:
            raise VLLMValidationError(f"{SEED} goes with temperature=0 and {TEMPERATURE} above 0")

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory  # what vLLM passes to every processor
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Noise changes which token is largest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they enter, leave and change rows."""
        process_dict_updates(self._rows, batch_update, _Row.of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """float32[batch, vocabulary] in, the same with noisy rows out."""
        if not self._rows:
            return logits
        keys = [stream_key(row.seed, row.position) for row in self._rows.values()]
        key = torch.tensor(keys, dtype=torch.int64, device=self._device)
        at = torch.tensor(list(self._rows), dtype=torch.int64, device=self._device)
        temperature = torch.tensor(
            [row.temperature for row in self._rows.values()], dtype=logits.dtype, device=self._device
        ).unsqueeze(1)
        size = logits.shape[1]
        rows = max(1, _CHUNK // size)
        for start in range(0, len(keys), rows):
            part = slice(start, start + rows)
            scaled = logits[at[part]].div_(temperature[part])
            logits[at[part]] = scaled.add_(gumbel(key[part], size))
        return logits


class _Row:
    """One request of the batch."""

    __slots__ = ("_output", "_prompt_tokens", "seed", "temperature")

    def __init__(self, seed: int, temperature: float, prompt_tokens: int, output: list[int]) -> None:
        self.seed = seed
        self.temperature = temperature
        self._prompt_tokens = prompt_tokens
        self._output = output  # vLLM appends to this very list

    @classmethod
    def of(cls, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> "_Row | None":
        extra = params.extra_args or {}
        if SEED not in extra:
            return None
        return cls(extra[SEED], extra[TEMPERATURE], len(prompt or ()), output)

    @property
    def position(self) -> int:
        """Absolute position of the token that is drawn next."""
        return self._prompt_tokens + len(self._output)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
