"""Measuring: what is timed and when it ends, what a profile is made of, and a real engine on CPUs."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import bench
from backends.bench import HELD_OUT, SPREAD, STEPS, Grid, Point, measure_points, noise, spread
from backends.engine import StepEngine
from backends.engine_types import EngineConfig, Request
from backends.fit import Fit, Measured, fit, tables
from backends.measure import _redis_note, app, measure
from backends.redis_server import RedisServer
from rlhfless.errors import InputError
from rlhfless.types.profile import Profile
from tests.profiles import tiny_profile
from tests.step_engines import Child, alone, config, gather, real

GRID = Grid(batches=(1, 2, 8), contexts=(16, 64, 200), max_batched_tokens=256)


# ---- what is measured


def test_a_grid_knows_its_points() -> None:
    assert GRID.slots == 8
    assert GRID.prompt_tokens == 200
    assert GRID.prefills == (16, 32, 64, 128, 256)
    assert Grid(batches=(1, 4), contexts=(16, 500), max_batched_tokens=300).prefills == (16, 32, 64, 128, 256, 300)
    assert GRID.held_out == ((5, 40), (5, 132))
    wide = Grid(batches=(1, 2, 4, 8, 16), contexts=(16, 32, 64, 128, 256, 512, 1024), max_batched_tokens=2048)
    assert len(set(wide.held_out)) == len(wide.held_out) == HELD_OUT
    for batch, context in wide.held_out:
        assert batch not in wide.batches
        assert context not in wide.contexts
    assert Grid(batches=(1, 2), contexts=(16, 17), max_batched_tokens=32).held_out == (
        (1, 16),
        (2, 17),
        (2, 16),
        (1, 17),
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batches": (2, 4)}, "the first must be 1"),
        ({"batches": (1,)}, "at least two"),
        ({"batches": (1, 4, 2)}, "ascending"),
        ({"contexts": (64, 64)}, "ascending"),
        ({"contexts": (STEPS - 1, 64)}, f"from {STEPS}"),
        ({"max_batched_tokens": 31}, "from 32 to 1600"),
        ({"max_batched_tokens": 1601}, "from 32 to 1600"),
    ],
)
def test_a_grid_that_cannot_be_measured_is_refused(changes: dict[str, Any], match: str) -> None:
    values: dict[str, Any] = {"batches": GRID.batches, "contexts": GRID.contexts, "max_batched_tokens": 256}
    with pytest.raises(InputError, match=match):
        Grid(**values | changes)


class World:
    """Times that are known: a point takes batch + context seconds, and `extra` more from time to time."""

    def __init__(self, extra: list[float]) -> None:
        self.now_s = 0.0
        self.asked: list[Point] = []
        self._extra = itertools.cycle(extra)

    def __call__(self, point: Point) -> float:
        self.asked.append(point)
        took_s = sum(point) * (1 + next(self._extra))
        self.now_s += took_s
        return took_s


POINTS: list[Point] = [(1, 16), (1, 64), (2, 16), (2, 64), (0, 32)]


def test_measuring_ends_when_the_best_rounds_agree() -> None:
    world, told = World([0.0]), list[str]()
    found = measure_points(world, POINTS, until_s=1e9, progress=told.append, clock=lambda: world.now_s)
    assert found == {point: [sum(point)] * bench.MIN_ROUNDS for point in POINTS}
    rounds = [world.asked[start : start + 5] for start in range(0, 15, 5)]
    assert all(sorted(one) == sorted(POINTS) for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]  # shuffled
    assert len(told) == 3
    assert "differ by 0.0%" in told[-1]


def test_noise_is_measured_again_and_the_least_counts() -> None:
    world = World([0.5, 0.2, 0.0, 1.0, 0.1, 0.7, 0.3])
    found = measure_points(world, POINTS, until_s=1e9, progress=lambda _: None, clock=lambda: world.now_s)
    assert spread(found) <= SPREAD
    assert len(world.asked) > 5 * bench.MIN_ROUNDS
    assert all(times == sorted(times) and times[0] == sum(point) for point, times in found.items())
    assert noise(found) > 0.1


def test_at_the_limit_every_point_has_two_rounds() -> None:
    world = World([0.5, 0.2, 0.0, 1.0, 0.1, 0.7, 0.3])
    found = measure_points(world, POINTS, until_s=0.0, progress=lambda _: None, clock=lambda: world.now_s)
    assert [len(times) for times in found.values()] == [2] * 5
    later = World([0.5, 0.2, 0.0, 1.0, 0.1, 0.7, 0.3])
    until_s = world.now_s + 20.0  # in the middle of the third round
    found = measure_points(later, POINTS, until_s=until_s, progress=lambda _: None, clock=lambda: later.now_s)
    assert {len(times) for times in found.values()} == {2, 3}


# ---- from times to a profile


def _line(batch: int, context: int) -> float:
    return 5e-3 + 2e-4 * batch + 7e-7 * batch * context


def _times(grid: Grid) -> dict[Point, float]:
    decode = {(b, c): _line(b, c) for b in grid.batches for c in grid.contexts}
    return decode | {(0, tokens): 1e-3 + 1e-4 * tokens for tokens in grid.prefills}


def test_the_fit_finds_the_line_that_the_times_are_on() -> None:
    found = fit({(b, c): _line(b, c) for b in (1, 4, 32) for c in (16, 100, 1000)})
    assert (found.a_s, found.b_s, found.c_s) == pytest.approx((5e-3, 2e-4, 7e-7))
    assert found(10, 200) == pytest.approx(_line(10, 200))
    assert found.p90_error < 1e-9
    assert str(found).startswith("t = 5.000 ms + 0.2000 ms x batch + 0.7000 us x batch x context")
    off = fit({(b, c): _line(b, c) * (1.1 if b == 4 else 1.0) for b in (1, 4, 32) for c in (16, 100, 1000)})
    assert 0 < off.mean_error < off.p90_error < 0.1


def test_times_become_tables_that_never_fall() -> None:
    best = _times(GRID)
    decode, prefill, notes, _ = tables(GRID, best)
    assert notes == ()
    assert decode == pytest.approx(np.array([[_line(b, c) for c in GRID.contexts] for b in GRID.batches]), abs=1e-9)
    assert prefill == pytest.approx([1e-3 + 1e-4 * tokens for tokens in GRID.prefills])
    del best[8, 200]  # does not fit the KV cache
    best[2, 64] = best[1, 64] * 0.9
    best[0, 256] = best[0, 128] / 2
    decode, prefill, notes, line = tables(GRID, best)
    assert decode[2, 2] == pytest.approx(line(8, 200), abs=1e-9)
    assert decode[1, 1] == pytest.approx(max(decode[0, 1], decode[1, 0]))
    assert prefill[-1] == prefill[-2]
    assert [note.split(" ")[:4] for note in notes] == [
        ["1", "of", "9", "decode"],
        ["1", "of", "9", "decode"],
        ["1", "of", "5", "prefill"],
    ]
    assert "from the fit" in notes[0]
    assert "100.0% at most" in notes[2]


def test_the_table_tells_how_far_off_grid_and_fit_are() -> None:
    profile = tiny_profile()
    truth = float(profile.decode_iteration_s(3, 100))
    line = Fit(a_s=truth, b_s=0.0, c_s=0.0, mean_error=0.0, p90_error=0.0)
    lines = list(Measured(profile=profile, fit=line, held_out={(3, 100): truth / 2}).table())
    assert lines[1].split()[:2] == ["3", "100"]
    assert lines[1].count("+100.0%") == 2
    assert lines[-1].endswith("grid 100.0%, fit 100.0%")


# ---- the real engine


def _command(arguments: list[str], stdout: Path) -> None:
    """The command in this process, whose vLLM is already imported; with its standard output in a file."""
    sys.argv = ["measure", *arguments]
    with stdout.open("w") as file:
        os.dup2(file.fileno(), 1)
    app(arguments, standalone_mode=False)
    sys.stdout.flush()


def _run(engine: StepEngine, lengths: list[int]) -> tuple[int, float, int, float]:
    """Responses of known lengths: iterations, seconds, prompt tokens, mean prompt."""
    rng = np.random.default_rng(5)
    before = engine.counters().iterations
    prompts = [rng.integers(3, 90, 40 + 5 * number).tolist() for number in range(len(lengths))]
    engine.submit(
        Request(response=number, token_ids=prompt, max_tokens=length, temperature=1, seed=number, force_length=True)
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    done = [one.done for one in gather(engine, len(lengths)).values()]
    took_s = max(one.last_token_s or 0 for one in done) - min(one.admitted_s or 0 for one in done)
    sizes = [len(prompt) for prompt in prompts]
    return engine.counters().iterations - before, took_s, sum(sizes), sum(sizes) / len(sizes)


def _predict(profile: Profile, lengths: list[int], prompt_tokens: int, mean_prompt: float) -> tuple[int, float]:
    """One prefill, then decoding between the ends of responses, by the closed form."""
    left = sorted(lengths)
    iterations, total_s, at = 1, float(profile.prefill_s(prompt_tokens)), 1
    while left:
        count, batch = left[0] - at, len(left)
        context = mean_prompt + at
        whole_s = profile.decode_run_s(batch, context, count)
        steps_s = sum(float(profile.decode_iteration_s(batch, context + step)) for step in range(count))
        assert whole_s == pytest.approx(steps_s)
        total_s, iterations, at = total_s + whole_s, iterations + count, left[0]
        left = [length for length in left if length > at]
    return iterations, total_s


@pytest.mark.slow
@real
def test_a_measured_profile_is_an_ordinary_one_and_predicts_a_run(tiny_model: Path, tmp_path: Path) -> None:
    out, stdout = tmp_path / "new" / "profile.json", tmp_path / "stdout"
    options = {"model": str(tiny_model), "out": str(out), "batches": "1,2,4,8", "contexts": "16,64,200"}
    options |= {"limit-s": "20", "kv-cache-bytes": str(32 << 20)}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    alone(_command, arguments, stdout)

    profile = Profile.read(out)
    data = profile.data
    assert (data.name, data.model, data.gpu, data.tp) == ("tiny-model_cpu_tp1", "tiny-model", "cpu", 1)
    assert (data.kind, data.max_slots, data.max_batched_tokens) == ("measured", 8, 1600)
    assert data.decode_batch.tolist() == [1, 2, 4, 8]
    assert data.decode_context.tolist() == [16, 64, 200]
    assert data.prefill_tokens.tolist() == [16, 32, 64, 128, 256, 512, 1024, 1600]
    assert data.kv_bytes_per_token == 2 * 4 * 2 * 64 * 4  # keys and values, layers, heads, their size, float32
    assert data.kv_capacity_tokens == (32 << 20) / data.kv_bytes_per_token - 32  # vLLM keeps one block
    assert 2.3e6 < data.parameters == data.weight_bytes / 4 < 2.5e6
    assert data.iteration_overhead_s == 0
    assert data.cold_start_s >= data.warm_start_s > 0
    assert "python -m backends.measure --model" in data.origin
    assert "vllm " in data.origin
    notes = " ".join(data.notes)
    for part in ("t = ", "rounds", "machine", "CPUs", "Weight update", "imported vLLM before"):
        assert part in notes
    lines = stdout.read_text().splitlines()
    assert lines[0].startswith("fit: t = ")
    assert lines[-1] == str(out)
    assert len(lines) == 2 + 1 + 4 + 1  # fit and path, heading, held-out points, their mean: nothing of vLLM
    assert [path.name for path in out.parent.iterdir()] == [out.name]

    lengths = [10, 25, 25, 40, 60, 70, 90, 120]
    engine = Child(config(tiny_model, max_slots=8, max_batched_tokens=1600))
    try:
        engine(_run, lengths)
        iterations, took_s, prompt_tokens, mean_prompt = engine(_run, lengths)
    finally:
        assert engine.close() == 0
    predicted, predicted_s = _predict(profile, lengths, prompt_tokens, mean_prompt)
    assert predicted == iterations == max(lengths)
    assert predicted_s / 10 < took_s < predicted_s * 10  # a machine that others use may be very slow for a while
    print(f"{iterations} iterations: {took_s:.3f} s, predicted {predicted_s:.3f} s")


def _too_little_kv(folder: Path) -> list[str]:
    told = []
    grid = Grid(batches=(1, 4), contexts=(400, 500), max_batched_tokens=512)
    values: dict[str, Any] = {"model": str(folder), "dtype": "float32", "device": "cpu", "block_size": 32}
    engine = EngineConfig(
        **values,
        max_model_len=grid.longest,
        max_slots=4,
        kv_cache_bytes=3 << 20,  # one response of each length, not four
        max_batched_tokens=512,
        prefix_caching=True,
    )
    try:
        measure(engine, grid, limit_s=1.0)
    except InputError as error:
        told.append(str(error))
    return told


@pytest.mark.slow
@real
def test_an_engine_without_room_for_the_grid_is_named(tiny_model: Path) -> None:
    told = alone(_too_little_kv, tiny_model)
    assert len(told) == 1
    assert "KV cache of 736 tokens holds only 2 of the decode points" in told[0]


# ---- what the user gets wrong


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "Missing option"),
        (["--model", "MODEL", "--out", "OUT", "--device", "tpu"], "must be cpu or cuda"),
        (["--model", "MODEL", "--out", "OUT", "--gpu", "l40s"], "--device cuda"),
        (["--model", "MODEL", "--out", "OUT", "--device", "cuda"], "must be one of h100_sxm"),
        (["--model", "MODEL", "--out", "OUT", "--device", "cuda", "--gpu", "cpu"], "must be one of h100_sxm"),
        (["--model", "nowhere", "--out", "OUT"], "nowhere is not a folder with a Hugging Face model"),
        (["--model", "MODEL", "--out", "OUT", "--batches", "1,x"], "--batches '1,x': must be whole numbers"),
        (["--model", "MODEL", "--out", "OUT", "--batches", "2,4"], "the first must be 1"),
        (["--model", "MODEL", "--out", "OUT", "--contexts", "64,32"], "ascending"),
        (["--model", "MODEL", "--out", "OUT", "--batches", "1,4", "--max-slots", "8"], "last of --batches, 4"),
        (["--model", "MODEL", "--out", "OUT", "--max-batched-tokens", "1"], "max-batched-tokens 1"),
        (["--model", "MODEL", "--out", "OUT", "--limit-s", "0"], "--limit-s 0.0: must be above 0"),
        (["--model", "MODEL", "--out", "OUT", "--limit-s", "soon"], "--limit-s"),
        (["--model", "MODEL", "--out", "."], "--out .: must be a file"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], match: str, tmp_path: Path) -> None:
    """Before anything heavy is imported."""
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "profile.json"
    names = {"MODEL": str(tmp_path), "OUT": str(out)}
    ran = subprocess.run(
        [sys.executable, "-m", "backends.measure", *(names.get(each, each) for each in arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    assert match in ran.stderr
    assert not out.exists()


def test_a_missing_vllm_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("backends.measure.prepare", lambda _: None)
    with pytest.raises(InputError, match=r"vllm is not installed: pip install 'rlhfless\[cpu\]'"):
        measure(config(str(tmp_path)), GRID)
    with pytest.raises(InputError, match="unknown GPU 'abacus'"):
        measure(config(str(tmp_path)), GRID, gpu="abacus")


@pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="needs redis-server and the package redis",
)
def test_kv_through_redis_is_timed_and_must_come_back() -> None:
    with RedisServer() as server:
        url = server.url
        note = _redis_note(url, 4096)
        assert note.startswith("KV through Redis, blocks of 4096 bytes, 64 at once: saved in 0.")
    with pytest.raises(InputError, match="0 of 64 KV blocks came back") as caught:
        _redis_note(url, 4096)
    assert url not in str(caught.value)  # it holds the password


def test_a_password_stays_out_of_the_profile() -> None:
    from backends.measure import _without_password

    given = ["--redis", "redis://:secret@10.0.0.1:6379", "--redis=redis://:secret@h", "--model", "a/b"]
    told = json.dumps(_without_password(given))
    assert "secret" not in told
    assert "10.0.0.1" in told
