"""What every provider shares: the grids, the limits of an actor, its memory, and putting a Profile together."""

from collections.abc import Sequence
from math import floor

import numpy as np

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.types.arrays import FloatArray, ints
from rlhfless.types.cluster import GPUS
from rlhfless.types.profile import SCHEMA, Profile, ProfileData
from rlhfless.units import GIB, MIB
from sim.profiles.model import ModelShape

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Grid batches of the decode table (chosen: denser than powers of two, which would hide the steps of the kernels)."""
CONTEXTS = (16, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Grid mean contexts in tokens (chosen: interpolating here is 0.4 to 1.5 % off the tables on average)."""
PREFILL_TOKENS = (16, 32, 64, 128, 256, 384, 512, 544, 768, 800, 1024, 2048, 3072, 4096, 6144, 8192)
"""Grid sizes of one prefill iteration (chosen; 544 and 800 because the L40S tables step up just above 512 and 768)."""
PROMPT_CAP_TOKENS = 1024
"""Longest prompt of the paper (RLHFless §6): larger prefill iterations are batches of prompts of this size."""

MAX_SLOTS = 256
"""Responses at once: default max_num_seqs of vLLM 0.8, the version of the paper (RLHFless §5)."""
MAX_BATCHED_TOKENS = 8192
"""Tokens of one prefill iteration (chosen: what vLLM 0.8 takes by default for offline batches)."""
UTILISATION = 0.9
"""Share of a GPU's memory that vLLM takes: its default gpu_memory_utilization."""
ACTIVATION_BYTES = 1.26 * GIB
"""Activation peak of a forward pass of 8192 tokens, per GPU.

Measured by vLLM's maintainers with Llama-3-8B on an 80 GB GPU, github.com/vllm-project/vllm/pull/10511."""
RUNTIME_ALONE_BYTES = 1.79 * GIB
"""CUDA context and libraries, per GPU, without tensor parallelism; from the same log."""
RUNTIME_PARALLEL_BYTES = 3.58 * GIB
"""The same with tensor parallelism (communication buffers); from the same log, at tp 2."""

COLD_START_S = 40.0
"""Chosen: 12 s Python, CUDA and NCCL, 5 s memory profiling, 23 s CUDA graph capture; the weights come later."""
WARM_START_S = 1.5
"""Chosen: waking an engine that sleeps with its memory released takes 1 to 2 s; again without the weights."""
START_NOTE = (
    f"cold_start_s {COLD_START_S:g} and warm_start_s {WARM_START_S:g} are chosen, not measured: process start, memory "
    "profiling and CUDA graph capture of an engine of the vLLM 0.8 line; waking one that sleeps. Neither holds the "
    "transfer of weights."
)


def reserve_bytes(tp: int) -> float:
    """Bytes of one GPU that hold neither weights nor KV: activations, CUDA context, communication buffers."""
    return ACTIVATION_BYTES + (RUNTIME_ALONE_BYTES if tp == 1 else RUNTIME_PARALLEL_BYTES)


def kv_capacity_tokens(shape: ModelShape, gpu: str, tp: int) -> int:
    """Tokens whose KV fits on `tp` GPUs beside the weights.

    Raises InputError for an unknown GPU, InfeasibleError if not even one token fits.
    """
    if gpu not in GPUS:
        raise InputError(f"unknown GPU {gpu!r}: known are {', '.join(GPUS)}")
    room = tp * (GPUS[gpu].memory_bytes * UTILISATION - reserve_bytes(tp)) - shape.weight_bytes
    tokens = floor(room / shape.kv_bytes_per_token(tp))
    if tokens < 1:
        raise InfeasibleError(
            f"{shape.name}: {shape.weight_bytes / GIB:.1f} GiB of weights do not fit on {tp} x {gpu} of "
            f"{GPUS[gpu].memory_bytes / GIB:.1f} GiB; take more GPUs per actor"
        )
    return tokens


def memory_note(shape: ModelShape, gpu: str, tp: int) -> str:
    """How kv_capacity_tokens came about, and how far it moves with the one figure that is least certain."""
    per_tenth = 0.1 * GIB * tp / shape.kv_bytes_per_token(tp)
    return (
        f"kv_capacity_tokens = floor((tp x ({GPUS[gpu].memory_bytes / MIB:.0f} MiB reported by the driver x "
        f"{UTILISATION} - {reserve_bytes(tp) / GIB:.2f} GiB reserve) - weight_bytes) / kv_bytes_per_token); the "
        "reserve was measured with Llama-3-8B (vllm-project/vllm pull request 10511) and is assumed here; each 0.1 GiB "
        f"of it per GPU moves the capacity by {per_tenth:.0f} tokens."
    )


def gpu_key(name: str) -> str:
    """The catalogue's name of a GPU, which may be given without the form factor: a100 is a100_sxm.

    Raises InputError for an unknown one.
    """
    key = name if name in GPUS else f"{name}_sxm"
    if key not in GPUS:
        raise InputError(f"unknown GPU {name!r}: known are {', '.join(GPUS)}")
    return key


def rising(values: FloatArray) -> tuple[FloatArray, int, float]:
    """`values` under a running maximum along every axis; how many entries that raised, and by what share at most.

    Measured tables fall here and there by noise or by a faster kernel; a Profile must not.
    """
    result = values
    for axis in range(values.ndim):
        result = np.maximum.accumulate(result, axis=axis)
    return result, int(np.count_nonzero(result > values)), float(np.max(result / values) - 1)


def halfway_rising(values: FloatArray) -> tuple[FloatArray, float]:
    """The rising figures whose largest change is least, and that change as a share.

    Halfway between the running maximum from below and the running minimum from above. For tables with steps down that
    are no noise: a kernel that serves 16 rows faster than another serves 8.
    """
    high, low = values, np.flip(values)
    for axis in range(values.ndim):
        high, low = np.maximum.accumulate(high, axis=axis), np.minimum.accumulate(low, axis=axis)
    result = (high + np.flip(low)) / 2
    return result, float(np.max(np.abs(result / values - 1)))


def assemble(
    *,
    shape: ModelShape,
    gpu: str,
    tp: int,
    name: str,
    kind: str,
    decode_s: FloatArray,
    prefill_s: FloatArray,
    origin: str,
    licence: str,
    notes: tuple[str, ...],
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    prefill_tokens: Sequence[int] = PREFILL_TOKENS,
) -> Profile:
    """A checked Profile; latencies float[batches, contexts] and float[prefill_tokens].

    Limits of an actor end with the grids where those end first. Latencies are kept to the nanosecond, so that a file
    does not depend on the last bit of a sum.
    """
    data = ProfileData(
        schema=SCHEMA,
        name=name,
        model=shape.name,
        gpu=gpu,
        tp=tp,
        kind=kind,
        origin=origin,
        licence=licence,
        notes=notes,
        parameters=float(shape.parameters),
        weight_bytes=float(shape.weight_bytes),
        kv_bytes_per_token=float(shape.kv_bytes_per_token(tp)),
        kv_capacity_tokens=kv_capacity_tokens(shape, gpu, tp),
        max_slots=min(MAX_SLOTS, batches[-1]),
        max_batched_tokens=min(MAX_BATCHED_TOKENS, prefill_tokens[-1]),
        decode_batch=ints(batches),
        decode_context=ints(contexts),
        decode_s=np.round(decode_s, 9),
        prefill_tokens=ints(prefill_tokens),
        prefill_s=np.round(prefill_s, 9),
        iteration_overhead_s=0.0,
        cold_start_s=COLD_START_S,
        warm_start_s=WARM_START_S,
    )
    return Profile.from_json(Profile(data=data).to_json(), name)
