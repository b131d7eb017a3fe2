"""Profiles from measured operator tables: NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0), vLLM, one entry per kernel.

The package sums measured matrix products, attention and all-reduces of one forward pass (norms, activations and the
embedding come from its bandwidth formula). Its answers are in milliseconds; they leave as seconds. It is an optional
extra and is imported only here, when a profile is built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rlhfless.errors import InputError, RlhflessError
from rlhfless.types.arrays import FloatArray
from rlhfless.types.cluster import GPUS
from rlhfless.types.profile import Profile
from rlhfless.units import MS
from sim.profiles.common import (
    BATCHES,
    CONTEXTS,
    PREFILL_TOKENS,
    PROMPT_CAP_TOKENS,
    START_NOTE,
    assemble,
    kv_capacity_tokens,
    memory_note,
    rising,
)
from sim.profiles.model import ModelShape, read_shape
from sim.profiles.registry import model_config, model_shape

PACKAGE = "aiconfigurator-core"
PACKAGE_VERSION = "0.12.0"
"""The version that the shipped files came from; another one holds other tables."""
BACKEND = "vllm"
BACKEND_VERSION = "0.24.0"
"""vLLM version of the tables: the package's current one for l40s and h100_sxm."""
LICENCE = (
    "Apache-2.0; derived from NVIDIA aiconfigurator (aiconfigurator-core), Copyright NVIDIA CORPORATION & AFFILIATES"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One profile to build."""

    model: str
    """Key of a shipped model config."""
    gpu: str
    """System of the package and key of the GPU catalogue."""
    tp: int
    """GPUs of one actor."""

    @property
    def name(self) -> str:
        """Name of the profile and of its file."""
        return f"{self.model}_{self.gpu}_tp{self.tp}"


TARGETS = tuple(
    Target(model=model, gpu=gpu, tp=tp)
    for model, gpu, sizes in (
        ("qwen2.5-3b", "l40s", (1, 2)),
        ("qwen2.5-7b", "l40s", (1, 2, 4)),
        ("llama-2-70b", "h100_sxm", (2, 4, 8)),
        ("llama-3-8b", "h100_sxm", (1,)),
    )
    for tp in sizes
)
"""What is shipped: the models of the paper's testbed and simulation (RLHFless §6), and a small one on H100."""


def chosen(names: Sequence[str]) -> tuple[Target, ...]:
    """The targets of those names, all of them for no name. Raises InputError for an unknown one."""
    known = {target.name: target for target in TARGETS}
    for name in names:
        if name not in known:
            raise InputError(f"no recipe for profile {name!r}: known are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else TARGETS


def build(target: Target) -> Profile:
    """The profile of `target`, the same bytes on every run. Raises InputError if the package is missing."""
    return _build(
        model_shape(target.model), model_config(target.model), target.gpu, target.tp, target.name, BACKEND_VERSION,
        f"python -m sim.profiles build {target.name}",
    )  # fmt: skip


def build_from(config: Path, gpu: str, tp: int) -> Profile:
    """The profile of the model of a Hugging Face config.json on any GPU type that the package has measured.

    Raises InputError for a config that cannot be read or that the package does not take, a GPU that was not measured, a
    missing package; InfeasibleError where the model does not split or fit.
    """
    shape = read_shape(config)
    shape.require_split(tp)
    version = _version(gpu)
    kv_capacity_tokens(shape, gpu, tp)
    try:
        return _build(
            shape, config.read_bytes(), gpu, tp, f"{shape.key}_{gpu}_tp{tp}", version,
            f"python -m sim.profiles tables CONFIG --gpu {gpu} --tp {tp}",
        )  # fmt: skip
    except RlhflessError:
        raise
    except Exception as error:  # the package has no base class of its errors
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{config}: {PACKAGE} does not take this model on {tp} x {gpu} ({reason[0]})") from None


def _version(gpu: str) -> str:
    """The vLLM version of the package's current tables of a GPU type. Raises InputError where it has none."""
    _engine_class()
    from aiconfigurator_core.sdk.perf_database import get_version_slots

    def slots(name: str) -> dict[str, str]:
        return get_version_slots(name, BACKEND) or {}

    if "current" not in slots(gpu):
        measured = ", ".join(name for name in GPUS if "current" in slots(name))
        raise InputError(f"{PACKAGE} has no {BACKEND} measurements of {gpu}; it has {measured}; or take a roofline")
    return slots(gpu)["current"]


def _build(shape: ModelShape, config: bytes, gpu: str, tp: int, name: str, version: str, command: str) -> Profile:
    shape.require_split(tp)
    engine_class = _engine_class()
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(config)
        engine = engine_class.compile(folder, gpu, BACKEND, backend_version=version, tp_size=tp)
    decode, decode_raised, decode_by = rising(_decode_s(engine.predict_decode_latency))
    prefill, prefill_raised, prefill_by = rising(_prefill_s(engine.predict_prefill_latency))
    return assemble(
        shape=shape,
        gpu=gpu,
        tp=tp,
        name=name,
        kind="tables",
        decode_s=decode,
        prefill_s=prefill,
        origin=(
            f"{PACKAGE} {PACKAGE_VERSION}: operators measured by NVIDIA on {gpu} under vLLM {version} "
            f"(collectives partly under earlier versions), summed over the model; {command}"
        ),
        licence=LICENCE,
        notes=(
            _rising_note("decode", decode_raised, decode.size, decode_by),
            _rising_note("prefill", prefill_raised, prefill.size, prefill_by),
            f"Prefill: up to {PROMPT_CAP_TOKENS} tokens are one sequence, more are sequences of {PROMPT_CAP_TOKENS} "
            "(the paper's prompt cap); longer prompts cost more attention than this says.",
            "Sums of measured operators leave out the engine's own work (scheduling, sampling, launches) and read 8 to "
            "25 % below whole engines; iteration_overhead_s is 0 here and may be calibrated.",
            memory_note(shape, gpu, tp),
            START_NOTE,
            *_doubts(shape, gpu, tp),
        ),
    )


def _engine_class() -> Any:
    try:
        from aiconfigurator_core.sdk import EngineHandle
    except ImportError:
        raise InputError(f"building profiles needs {PACKAGE}: pip install 'rlhfless[profiles]'") from None
    found = metadata.version(PACKAGE)
    if found != PACKAGE_VERSION:
        raise InputError(f"{PACKAGE} {found} is installed, the profiles need {PACKAGE_VERSION}; see rlhfless[profiles]")
    return EngineHandle


def _decode_s(latency_ms: Callable[[int, int, int], float]) -> FloatArray:
    # The package asks for the tokens before the iteration and the output length; the second output token is the
    # first decode iteration, and it attends to one token more.
    return np.array([[latency_ms(batch, context - 1, 2) * MS for context in CONTEXTS] for batch in BATCHES])


def _prefill_s(latency_ms: Callable[[int, int], float]) -> FloatArray:
    cap = PROMPT_CAP_TOKENS
    return np.array([latency_ms(max(tokens // cap, 1), min(tokens, cap)) * MS for tokens in PREFILL_TOKENS])


def _rising_note(what: str, raised: int, of: int, share: float) -> str:
    if not raised:
        return f"The {what} figures rise as they come."
    return f"{raised} of {of} {what} figures were raised to a running maximum, by at most {share:.1%}."


def _doubts(shape: ModelShape, gpu: str, tp: int) -> tuple[str, ...]:
    doubts = []
    if 0 < shape.max_positions < CONTEXTS[-1]:
        doubts.append(
            f"The model's position embedding ends at {shape.max_positions} tokens; the grid goes on to {CONTEXTS[-1]} "
            "because latency does not depend on it."
        )
    if gpu == "l40s" and tp > 1:
        doubts.append(
            "All-reduces on L40S go over PCIe; those of the tables are slow, most of all at tp 4 (a few GB/s), where "
            "they outweigh the split: large batches and prefill come out slower than on fewer GPUs. Kept as measured."
        )
    return tuple(doubts)
