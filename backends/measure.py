"""python -m backends.measure: profile a running engine, as the paper does with dummy batches (RLHFless §4.4).

Decode latency over batch and context, prefill over tokens, KV, start and weight update of the engine of an actor, into
an ordinary profile file. `backends.bench` says how iterations are timed.
"""

import math
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from backends.bench import PROMPT_CAP_TOKENS, STEPS, Bench, Grid, measure_points, noise, spread
from backends.engine_types import EngineConfig
from backends.environment import Device, prepare, require
from backends.fit import Measured, tables
from backends.kv_block import layout_digest
from backends.kv_transfer import RedisBlocks, RedisSettings
from backends.redis_server import hide_password
from backends.weight_sync import checkpoint, shapes
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import GPUS
from rlhfless.types.profile import SCHEMA, Profile, ProfileData
from rlhfless.units import MIB, MS

BATCHES = {"cpu": (1, 2, 4, 8, 16, 24, 32), "cuda": (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)}
CONTEXTS = {"cpu": (16, 128, 256, 512, 1024), "cuda": (128, 512, 1024, 2048, 3072)}
"""Decode grids (chosen: latency is close to linear in both directions, so a few points carry it)."""
BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens of one prefill iteration (chosen)."""
CPU = "cpu"
"""The GPU type of an engine without one."""
CARDS = tuple(name for name in GPUS if name != CPU)
"""The others."""
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
KV_BYTES = int(256 * MIB)
"""KV of an engine on CPUs (chosen: holds the default grid of a small model)."""
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of a KV block: what is quick on CPUs, vLLM's default on GPUs."""
LIMIT_S = 80.0
"""Seconds after which no point is begun any more (chosen)."""
NOISY = 0.1
"""A machine whose typical round is slower than the best by more than this share is called noisy (chosen)."""
UPDATES = 3
"""Weight updates measured; the quickest counts."""
REDIS_BLOCKS = 64
"""KV blocks that are sent to a Redis and back."""


def measure(
    config: EngineConfig,
    grid: Grid,
    *,
    gpu: str = CPU,
    limit_s: float = LIMIT_S,
    redis: str | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Build an engine, measure it for about `limit_s` seconds in all, and release it. One call a process.

    Raises InputError where vLLM, a GPU type or a Redis is missing, EngineError for what the engine cannot do.
    """
    began_s = time.monotonic()
    if gpu not in GPUS:
        raise InputError(f"unknown GPU {gpu!r}: known are {', '.join(GPUS)}")
    fresh = "vllm" not in sys.modules
    prepare(config.device)
    require("vllm")
    parameters = sum(math.prod(shape) for shape in shapes(checkpoint(config.model)).values())
    progress("importing vLLM")
    for name in ("vllm.v1.engine.llm_engine", f"vllm.v1.worker.{'cpu' if config.device == 'cpu' else 'gpu'}_worker"):
        import_module(name)
    imported_s = time.monotonic()
    progress("building the engine")
    bench = Bench(config, grid)
    ready_s = time.monotonic()
    try:
        progress("warming up")
        bench.warm()
        points = [(b, c) for b in grid.batches for c in grid.contexts if bench.fits(b, c)]
        held = [point for point in grid.held_out if bench.fits(*point)]
        if len({b for b, _ in points}) < 2 or len({c for _, c in points}) < 2:
            raise InputError(
                f"the engine's KV cache of {bench.counters.headroom_tokens} tokens holds only {len(points)} of the "
                "decode points: give it more memory, or take smaller batches and contexts"
            )
        times = measure_points(
            bench.time,
            [*dict.fromkeys([*points, *held]), *((0, tokens) for tokens in grid.prefills)],
            until_s=began_s + limit_s,
            progress=progress,
        )
        update_s = min(bench.update_s() for _ in range(UPDATES))
        kv_bytes = bench.kv_bytes_per_token()
        redis_note = () if redis is None else (_redis_note(redis, round(kv_bytes * bench.counters.block_tokens)),)
    finally:
        bench.close()

    best_s = {point: of[0] for point, of in times.items()}
    decode_s, prefill_s, table_notes, line = tables(grid, best_s)
    name = Path(config.model).resolve().name if Path(config.model).is_dir() else config.model.rpartition("/")[2]
    rounds = min(map(len, times.values()))
    start = "a new process" if fresh else "a process that had imported vLLM before, so a new one takes longer"
    data = ProfileData(
        schema=SCHEMA,
        name=f"{name.lower()}_{gpu}_tp{config.tp}",
        model=name,
        gpu=gpu,
        tp=config.tp,
        kind="measured",
        origin=f"Measured on a running engine, {command or 'backends.measure.measure'}; {_versions()}.",
        licence="Apache-2.0",
        notes=(
            f"decode, from the grid: {line}.",
            f"Whole iterations of the engine, {config.dtype}, sampling at temperature 1; {rounds} rounds in shuffled "
            f"order, the least of the rounds' medians of {STEPS}; the two best rounds differ by {spread(times):.1%}.",
            f"{'Noisy' if noise(times) > NOISY else 'Quiet'} machine: the typical round was {noise(times):.1%} slower "
            f"than the best. {_machine(config)}",
            f"Start in {start}: import {imported_s - began_s:.1f} s, engine with weights from disk "
            f"{ready_s - imported_s:.1f} s; cold_start_s is the sum, warm_start_s the second (vLLM imported before).",
            f"Weight update from disk, with the reset of the prefix cache: {update_s:.3f} s.",
            *redis_note,
            *table_notes,
        ),
        parameters=float(parameters),
        weight_bytes=float(parameters * bench.value_bytes),
        kv_bytes_per_token=kv_bytes,
        kv_capacity_tokens=bench.counters.kv_blocks * bench.counters.block_tokens,
        max_slots=grid.slots,
        max_batched_tokens=grid.max_batched_tokens,
        decode_batch=ints(grid.batches),
        decode_context=ints(grid.contexts),
        decode_s=decode_s,
        prefill_tokens=ints(grid.prefills),
        prefill_s=prefill_s,
        iteration_overhead_s=0.0,  # the iterations were whole
        cold_start_s=round(ready_s - began_s, 3),
        warm_start_s=round(ready_s - imported_s, 3),
        kv_block_tokens=bench.counters.block_tokens,
    )
    profile = Profile.from_json(Profile(data=data).to_json(), data.name)
    return Measured(profile=profile, fit=line, held_out={point: best_s[point] for point in held})


def _redis_note(url: str, block_bytes: int) -> str:
    """Send blocks there and back. Raises InputError where they do not come back."""
    settings = RedisSettings(url=url, namespace=f"measure-{os.getpid()}", ttl_s=60.0)
    store = RedisBlocks(settings, layout=layout_digest("measure"), part_bytes=block_bytes)
    keys = [settings.key(settings.version, number.to_bytes(8, "big")) for number in range(REDIS_BLOCKS)]
    kv = np.random.default_rng(0).integers(0, 256, (REDIS_BLOCKS, block_bytes), dtype=np.uint8)
    try:
        started_s = time.perf_counter()
        store.save(keys, lambda first, end: kv[first:end])
        saved_s = time.perf_counter()
        found = len(store.fetch(keys))
        loaded_s = time.perf_counter()
    finally:
        store.close()
    if found != REDIS_BLOCKS:
        raise InputError(f"{hide_password(url)}: {found} of {REDIS_BLOCKS} KV blocks came back from this Redis")
    return (
        f"KV through Redis, blocks of {block_bytes} bytes, {REDIS_BLOCKS} at once: saved in "
        f"{(saved_s - started_s) / REDIS_BLOCKS / MS:.3f} ms, loaded in {(loaded_s - saved_s) / REDIS_BLOCKS / MS:.3f} "
        "ms a block."
    )


def _machine(config: EngineConfig) -> str:
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs ({platform.machine()})"
    return f"{cores}, {threads} for the engine." if config.device == "cpu" else f"{cores}, {config.tp} GPUs."


def _versions() -> str:
    parts = [f"{name} {import_module(name).__version__}" for name in ("vllm", "torch")]
    return ", ".join([*parts, f"Python {platform.python_version()}"])


# ---- the command

app = typer.Typer(add_completion=False)


@app.command()
def measure_command(
    model: Annotated[str, typer.Option(help="Folder of a Hugging Face model.")],
    out: Annotated[Path, typer.Option(help="The profile file to write.")],
    device: Annotated[str, typer.Option(help="cpu or cuda, as the installed vLLM.")] = "cpu",
    gpu: Annotated[str, typer.Option(help=f"GPU type, with cuda: {', '.join(CARDS)}.")] = "",
    tp: Annotated[int, typer.Option(help="GPUs of the engine; processes of one on CPUs.")] = 1,
    dtype: Annotated[str, typer.Option(help="Type of weights and KV; float32 on CPUs, bfloat16 on GPUs.")] = "",
    batches: Annotated[str, typer.Option(help="Decode batches, such as 1,2,4,8.")] = "",
    contexts: Annotated[str, typer.Option(help="Mean contexts in tokens, such as 16,256,1024.")] = "",
    max_slots: Annotated[int, typer.Option(help="Responses at once: the last batch. 0: as --batches.")] = 0,
    max_batched_tokens: Annotated[int, typer.Option(help="Largest prefill iteration. 0: by the device.")] = 0,
    kv_cache_bytes: Annotated[
        int, typer.Option(help="Memory for KV on each GPU. 0: 256 MiB on CPUs, vLLM's choice on GPUs.")
    ] = 0,
    limit_s: Annotated[float, typer.Option(help="Seconds after which no point is begun any more.")] = LIMIT_S,
    redis: Annotated[str, typer.Option(help="Also time KV through the Redis at this url.")] = "",
) -> None:
    """Measure a running engine and write its profile, an ordinary profile file."""
    if device not in BATCHES:
        raise InputError(f"--device {device}: must be {' or '.join(BATCHES)}")
    where: Device = "cpu" if device == "cpu" else "cuda"
    if where == "cpu" and gpu:
        raise InputError("--gpu is for --device cuda: an engine on CPUs has none")
    if where == "cuda" and gpu not in CARDS:
        raise InputError(f"--gpu {gpu!r}: must be one of {', '.join(CARDS)}")
    if not limit_s > 0:
        raise InputError(f"--limit-s {limit_s}: must be above 0")
    if out.is_dir() or not out.name:
        raise InputError(f"--out {out}: must be a file")
    grid = _grid(where, batches, contexts, max_slots, max_batched_tokens)
    config = EngineConfig(
        model=model,
        dtype=dtype or DTYPE[where],
        device=where,
        tp=tp,
        max_model_len=grid.longest,
        max_slots=grid.slots,
        kv_cache_bytes=kv_cache_bytes or (KV_BYTES if where == "cpu" else None),
        block_size=BLOCK_TOKENS[where],
        max_batched_tokens=grid.max_batched_tokens,
        prefix_caching=True,
    )
    began_s = time.monotonic()
    with _only_results_on_stdout():
        measured = measure(
            config,
            grid,
            gpu=gpu or CPU,
            limit_s=limit_s,
            redis=redis or None,
            command=shlex.join(["python", "-m", "backends.measure", *_without_password(sys.argv[1:])]),
            progress=lambda line: print(f"{time.monotonic() - began_s:5.0f} s  {line}", file=sys.stderr, flush=True),
        )
    _write(out, measured.profile.to_json() + "\n")
    print(f"fit: {measured.fit}")
    for line in measured.table():
        print(line)
    print(out)


def _grid(device: Device, batches: str, contexts: str, max_slots: int, max_batched_tokens: int) -> Grid:
    chosen = _numbers("batches", batches) or BATCHES[device]
    if max_slots and batches and max_slots != chosen[-1]:
        raise InputError(f"--max-slots {max_slots}: must be the last of --batches, {chosen[-1]}")
    if max_slots:
        chosen = (*(batch for batch in chosen if batch < max_slots), max_slots)
    lengths = _numbers("contexts", contexts) or CONTEXTS[device]
    if max_batched_tokens:
        return Grid(batches=chosen, contexts=lengths, max_batched_tokens=max_batched_tokens)
    most = chosen[-1] * min(PROMPT_CAP_TOKENS, lengths[-1])
    return Grid(batches=chosen, contexts=lengths, max_batched_tokens=min(BATCHED_TOKENS[device], most))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--{option} {text!r}: must be whole numbers with commas between, such as 1,2,4") from None


def _without_password(arguments: Sequence[str]) -> list[str]:
    return [hide_password(each) if "://" in each else each for each in arguments]


@contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    """vLLM, and libraries in C below it, print what they do; that goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _write(path: Path, text: str) -> None:
    """In one step: a reader finds the old file or the new one."""
    part = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(part).chmod(0o644)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            Path(part).unlink()
        raise InputError(f"{path}: cannot write the profile ({error.strerror})") from None


if __name__ == "__main__":
    run(app)
