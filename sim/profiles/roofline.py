"""Profiles from data sheets: what a model would cost if only bandwidth, FLOP/s and the links counted.

For models and GPUs that nobody measured. One iteration is the sum of its matrix products (the longer of reading the
weights and multiplying), its attention (the longer of reading the KV and multiplying), two all-reduces a layer, and a
fixed cost a layer. The constants below are the whole calibration.
"""

import numpy as np

from rlhfless.types.arrays import FloatArray
from rlhfless.types.cluster import GPUS, LOCAL_LATENCY_S, Gpu
from rlhfless.types.profile import Profile
from sim.profiles.common import (
    BATCHES,
    CONTEXTS,
    PREFILL_TOKENS,
    PROMPT_CAP_TOKENS,
    START_NOTE,
    assemble,
    kv_capacity_tokens,
    memory_note,
)
from sim.profiles.model import BYTES_PER_VALUE, ModelShape

MEMORY_EFFICIENCY = 0.8
"""Share of peak bandwidth that kernels reach; the factor in aiconfigurator-core 0.12.0's system files."""
COMPUTE_EFFICIENCY = 0.55
"""Share of peak FLOP/s in large products (chosen: the measured tables show about 0.45 on L40S and 0.65 on H100)."""
LINK_EFFICIENCY = 0.6
"""Share of the local link's bandwidth in a ring (chosen: the measured tables show about 0.5 to 0.75)."""
LAYER_S = 1e-5
"""Norms, activation and kernel launches of one layer (chosen: about ten small kernels inside a CUDA graph)."""
ALL_REDUCES_PER_LAYER = 2
"""After attention and after the MLP, as Megatron splits a layer."""


def all_reduce_s(shape: ModelShape, gpu: Gpu, tp: int, tokens: FloatArray) -> FloatArray:
    """Seconds of one iteration's all-reduces of `tokens` hidden vectors over a ring of `tp` GPUs, elementwise."""
    if tp == 1:
        return np.zeros_like(tokens)
    size_bytes = tokens * (shape.hidden * BYTES_PER_VALUE * 2 * (tp - 1) / tp)
    once_s = LOCAL_LATENCY_S + size_bytes / (gpu.local_bytes_per_s * LINK_EFFICIENCY)
    return np.asarray(shape.layers * ALL_REDUCES_PER_LAYER * once_s)


def decode_s(shape: ModelShape, gpu: Gpu, tp: int, batch: FloatArray, context: FloatArray) -> FloatArray:
    """Seconds of one decode iteration, elementwise over `batch` and mean `context` in tokens (broadcast)."""
    bytes_per_s = tp * gpu.memory_bytes_per_s * MEMORY_EFFICIENCY
    flops = tp * gpu.flops * COMPUTE_EFFICIENCY
    matrix = shape.layers * shape.matrix_per_layer + shape.vocab * shape.hidden  # an untied embedding is only looked up
    product_s = np.maximum(matrix * BYTES_PER_VALUE / bytes_per_s, 2 * matrix * batch / flops)
    tokens = batch * context
    attention_s = np.maximum(
        tokens * shape.kv_bytes_per_token(tp) / bytes_per_s,
        tokens * (4 * shape.layers * shape.heads * shape.head_dim) / flops,
    )
    return np.asarray(product_s + attention_s + all_reduce_s(shape, gpu, tp, batch) + shape.layers * LAYER_S)


def prefill_s(shape: ModelShape, gpu: Gpu, tp: int, tokens: FloatArray) -> FloatArray:
    """Seconds of one prefill iteration of `tokens` tokens, elementwise, cut into prompts of at most 1024 tokens."""
    bytes_per_s = tp * gpu.memory_bytes_per_s * MEMORY_EFFICIENCY
    flops = tp * gpu.flops * COMPUTE_EFFICIENCY
    full, rest = np.divmod(tokens, PROMPT_CAP_TOKENS)
    matrix, head = shape.layers * shape.matrix_per_layer, shape.vocab * shape.hidden
    prompts = full + (rest > 0)
    product_s = np.maximum(
        (matrix + head) * BYTES_PER_VALUE / bytes_per_s,
        2 * (matrix * tokens + head * prompts) / flops,  # logits for the last position alone
    )
    pairs = (full * PROMPT_CAP_TOKENS**2 + rest**2) / 2  # causal: half of every square
    attention_s = 4 * shape.layers * shape.heads * shape.head_dim * pairs / flops
    return np.asarray(product_s + attention_s + all_reduce_s(shape, gpu, tp, tokens) + shape.layers * LAYER_S)


def build(shape: ModelShape, gpu: str, tp: int) -> Profile:
    """The roofline profile of a model on `tp` GPUs of one host.

    Raises InputError for an unknown GPU or tp < 1, InfeasibleError if the model does not split or fit.
    """
    shape.require_split(tp)
    kv_capacity_tokens(shape, gpu, tp)  # raises for an unknown GPU and for a model that does not fit
    kind = GPUS[gpu]
    batch, context = np.array(BATCHES, dtype=np.float64), np.array(CONTEXTS, dtype=np.float64)
    return assemble(
        shape=shape,
        gpu=gpu,
        tp=tp,
        name=f"{shape.key}_{gpu}_tp{tp}_roofline",
        kind="roofline",
        decode_s=decode_s(shape, kind, tp, batch[:, None], context[None, :]),
        prefill_s=prefill_s(shape, kind, tp, np.array(PREFILL_TOKENS, dtype=np.float64)),
        origin=f"computed from the data sheet of {gpu}; python -m sim.profiles roofline CONFIG --gpu {gpu} --tp {tp}",
        licence="Apache-2.0",
        notes=(
            f"Nothing was measured: efficiencies {MEMORY_EFFICIENCY} of memory bandwidth, {COMPUTE_EFFICIENCY} of "
            f"FLOP/s and {LINK_EFFICIENCY} of the local link, {LAYER_S * 1e6:g} us a layer are cited or chosen.",
            memory_note(shape, gpu, tp),
            START_NOTE,
        ),
    )
