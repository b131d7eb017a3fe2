"""Vidur's CSVs: finding the files of a model on a GPU type, and checking that they hold what they should.

Times are medians in milliseconds. Each file's largest operator is held against the data sheet, so that another unit, or
another GPU, does not pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlhfless.errors import InputError
from rlhfless.types.arrays import IntArray, ints
from rlhfless.types.cluster import GPUS, Gpu
from rlhfless.units import MS
from sim.profiles.model import BYTES_PER_VALUE, ModelShape

IMPLAUSIBLE = 30.0
"""A largest operator this many times slower, or faster, than the data sheet allows is in another unit (chosen: near the
square root of 1000; Vidur's own for Llama-2-70B on A100 are 1.3 to 5.2 times it)."""
KERNEL_S = 5e-6
"""The least that any kernel takes (chosen), so that small operators are not held against the data sheet alone."""

ATTENTION, MLP, ALL_REDUCE = "attention.csv", "mlp.csv", "all_reduce.csv"
GENERAL = (
    "attn_pre_proj", "attn_post_proj", "attn_rope", "mlp_up_proj", "mlp_down_proj", "mlp_act", "input_layernorm",
    "post_attention_layernorm", "add",
)  # fmt: skip
DECODE, PREFILL, REDUCE = (f"time_stats.{name}.median" for name in ("attn_decode", "attn_prefill", "all_reduce"))
MLP_UP = "time_stats.mlp_up_proj.median"
TP = "num_tensor_parallel_workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The files of one model on one GPU type, checked, and what they cover."""

    shape: ModelShape
    """The model."""
    gpu: str
    """Key of the GPU catalogue."""
    tp: int
    """GPUs of one actor."""
    paths: tuple[str, str, str, str]
    """mlp, attention, all_reduce and send_recv, as the package asks for them; the last is read for pipelines alone, of
    which there are none here, the third for tp above 1 alone."""
    vocab: int
    """Rows of the embedding that the measurements name; Vidur writes 32768 for Llama 2."""
    block_tokens: int
    """Tokens of a KV block in attention."""
    batches: IntArray
    """int[]: batches of decode attention, ascending."""
    contexts: IntArray
    """int[]: contexts of decode attention in tokens, ascending."""
    prefills: tuple[int, int]
    """Least and most tokens of a prompt in prefill attention."""
    tokens: tuple[int, int]
    """Least and most tokens of an iteration in every other operator."""

    @property
    def context_step(self) -> int:
        """Tokens by which every profiled context can be counted: the granularity of the predictor."""
        return int(np.gcd.reduce(self.contexts))


def read(shape: ModelShape, gpu: str, tp: int, folder: Path) -> Measurements:
    """Find and check the files under `folder`, which holds the CSVs themselves or Vidur's tree (compute/GPU/MODEL/...,
    network/GPU_HOST/...).

    Raises InputError for a missing or ambiguous file, a missing column, another model, a tensor-parallel size or a GPU
    that was not measured, and values that are no times in milliseconds.
    """
    shape.require_split(tp)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; it should hold {MLP}, {ATTENTION} and {ALL_REDUCE} of Vidur")
    card = GPUS[gpu]
    model = {"n_head": shape.heads, "n_kv_head": shape.kv_heads, "n_embd": shape.hidden}
    wide = model | {"n_expanded_embd": shape.intermediate}
    mlp_path, mlp = _read(
        folder, MLP, gpu, wide, [*columns_of(GENERAL), "num_tokens", "vocab_size", "use_gated_mlp", TP]
    )
    mlp = _rows(mlp, mlp_path, wide | {"use_gated_mlp": True, TP: tp})
    renamed = {"n_q_head" if name == "n_head" else name: value for name, value in model.items()}
    axes = ["batch_size", "kv_cache_size", "prefill_chunk_size", "block_size", TP]
    attention_path, attention = _read(folder, ATTENTION, gpu, renamed, [DECODE, PREFILL, *axes])
    attention = _rows(attention, attention_path, renamed | {TP: tp})
    block = int(attention["block_size"].min())
    attention = attention[attention["block_size"] == block]
    decoding = attention["prefill_chunk_size"] == 0
    decode, prefill = attention[decoding], attention[~decoding & (attention["kv_cache_size"] == 0)]
    for part, what in ((decode, "decode"), (prefill, "prefill without a KV cache")):
        if part.empty:
            raise InputError(f"{attention_path}: no rows of {what} for {shape.name} at tp {tp}")
    _check_times(mlp, mlp_path, columns_of(GENERAL))
    _check_times(decode, attention_path, [DECODE])
    _check_times(prefill, attention_path, [PREFILL])
    _check_unit(mlp, mlp_path, MLP_UP, "num_tokens", product_s(shape, card, tp, float(mlp["num_tokens"].max())))
    largest = decode.sort_values(["batch_size", "kv_cache_size"]).iloc[-1]
    _check_unit(
        decode, attention_path, DECODE, ["batch_size", "kv_cache_size"],
        float(largest["batch_size"] * largest["kv_cache_size"]) * shape.kv_bytes_per_token(tp)
        / (shape.layers * tp * card.memory_bytes_per_s),
    )  # fmt: skip
    longest = float(prefill["prefill_chunk_size"].max())
    pairs_s = 2 * longest**2 * shape.heads * shape.head_dim / (tp * card.flops)
    _check_unit(prefill, attention_path, PREFILL, "prefill_chunk_size", pairs_s)
    least, most = int(mlp["num_tokens"].min()), int(mlp["num_tokens"].max())
    reduce_path = ""
    if tp > 1:
        reduce_path, reduce = _read(
            folder, ALL_REDUCE, gpu, {}, [REDUCE, "num_workers", "devices_per_node", "size", "collective"]
        )
        reduce = _rows(reduce, reduce_path, {"collective": "all_reduce", "num_workers": tp, "devices_per_node": tp})
        _check_times(reduce, reduce_path, [REDUCE])
        size = float(reduce["size"].max())
        _check_unit(reduce, reduce_path, REDUCE, "size", size * 2 * (tp - 1) / tp / card.local_bytes_per_s)
        vector = shape.hidden * BYTES_PER_VALUE
        least, most = max(least, int(np.ceil(reduce["size"].min() / vector))), min(most, int(size // vector))
    batches = ints(np.unique(decode["batch_size"]))
    if batches[0] > 1 or batches[-1] < 2:
        raise InputError(f"{attention_path}: decode batches {batches[0]} to {batches[-1]}; they must begin with 1")
    return Measurements(
        shape=shape,
        gpu=gpu,
        tp=tp,
        paths=(mlp_path, attention_path, reduce_path, ""),
        vocab=int(mlp["vocab_size"].iloc[0]),
        block_tokens=block,
        batches=batches,
        contexts=ints(np.unique(decode["kv_cache_size"][decode["kv_cache_size"] > 0])),
        prefills=(int(prefill["prefill_chunk_size"].min()), int(longest)),
        tokens=(least, most),
    )


def columns_of(names: Iterable[str]) -> list[str]:
    return [f"time_stats.{name}.median" for name in names]


def _read(folder: Path, name: str, gpu: str, model: dict[str, int], columns: Sequence[str]) -> tuple[str, pd.DataFrame]:
    """The one file of that name for this GPU that holds rows of this model, with its path."""
    paths = _find(folder, name, gpu)
    frames = [(str(path), _csv(path, (*columns, *model))) for path in paths]
    if len(frames) > 1:
        fits = [np.logical_and.reduce([frame[key] == value for key, value in model.items()]) for _, frame in frames]
        frames = [each for each, kept in zip(frames, fits, strict=True) if kept.any()] or frames
    if len(frames) > 1:
        raise InputError(f"{folder}: several {name} for {gpu}: {frames[0][0]} and {frames[1][0]}; give one's folder")
    return frames[0]


def _csv(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, low_memory=False)
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"{path}: not readable as CSV ({reason})") from None
    if lacking := [column for column in columns if column not in frame.columns]:
        raise InputError(f"{path}: no column {lacking[0]!r}; {path.name} of Vidur has {', '.join(columns)}")
    return frame


def _find(folder: Path, name: str, gpu: str) -> list[Path]:
    """Files of that name in the folder itself or below a folder of this GPU. Raises InputError for none."""
    found = sorted(folder.rglob(name))
    short = gpu.removesuffix("_sxm")

    def named(path: Path) -> bool:
        parts = [part.lower() for part in path.relative_to(folder).parent.parts]
        return path.parent == folder or any(part == short or part.startswith(f"{short}_") for part in parts)

    kept = [path for path in found if named(path)]
    if not kept:
        others = f"; there is {', '.join(str(path) for path in found[:3])}" if found else ""
        raise InputError(f"{folder}: no {name} for {gpu}{others}")
    return kept


def _rows(frame: pd.DataFrame, path: str, wanted: dict[str, Any]) -> pd.DataFrame:
    """The rows with these values. Raises InputError that names the first one that the file does not have."""
    for column, value in wanted.items():
        kept = frame[frame[column] == value]
        if kept.empty:
            known = ", ".join(str(each) for each in frame[column].drop_duplicates().tolist()[:8])
            raise InputError(f"{path}: measured with {column} {known}; {value} is asked for")
        frame = kept
    return frame


def _check_times(frame: pd.DataFrame, path: str, columns: Iterable[str]) -> None:
    for column in columns:
        values = pd.to_numeric(frame[column], errors="coerce")
        bad = ~np.isfinite(values) | (values < 0)
        if bad.any():
            raise InputError(f"{path}: {column} holds {frame[column][bad].iloc[0]}; times are numbers, at least 0")
        if not (values > 0).any():
            raise InputError(f"{path}: {column} holds nothing but 0")


def _check_unit(frame: pd.DataFrame, path: str, column: str, size: str | list[str], least_s: float) -> None:
    """Compare the largest operator with what the data sheet allows at best, `least_s`."""
    value = float(frame.sort_values(size)[column].iloc[-1])
    ratio = value * MS / (least_s + KERNEL_S)
    if 1 / IMPLAUSIBLE <= ratio <= IMPLAUSIBLE:
        return
    unit = "microseconds" if ratio > 1 else "seconds"
    raise InputError(
        f"{path}: {column} of the largest row is {value:g}, {ratio:.2g} times the least that the data sheet allows in "
        f"ms; times must be in milliseconds, these look like {unit} (or are of another GPU or model)"
    )


def product_s(shape: ModelShape, card: Gpu, tp: int, tokens: float) -> float:
    """The least time of the MLP's first product on one of `tp` GPUs: reading its weights, or multiplying."""
    weights = 2 * shape.hidden * shape.intermediate / tp
    return max(weights * BYTES_PER_VALUE / card.memory_bytes_per_s, 2 * tokens * weights / card.flops)
