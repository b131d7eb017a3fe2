"""Profiles from Vidur's CSVs: made-up folders with known times, bad ones, and the public measurements of an A100."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.types.cluster import GPUS
from rlhfless.types.profile import Profile
from rlhfless.units import MS
from sim.profiles import __main__ as profiles
from sim.profiles import load, roofline, vidur, vidur_csv
from sim.profiles.model import ModelShape
from sim.profiles.registry import model_config, model_shape, models
from tests.commands import call

EXTRA = "this needs the extra: pip install 'rlhfless[vidur]'"
GENERAL = vidur_csv.columns_of(vidur_csv.GENERAL)
SHAPE = model_shape("llama-3-8b")
GPU = "h100_sxm"
TOKENS = [1, *range(8, 513, 8)]
BATCHES = range(1, 17)
CONTEXTS = range(32, 513, 32)
LAYER_PARTS = len(GENERAL)


def public(name: str) -> Path:
    folder = os.environ.get("RLHFLESS_TEST_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"RLHFLESS_TEST_DATA is not set: the folder with {name}/")
    return Path(folder) / name


def folder_of(
    path: Path,
    *,
    shape: ModelShape = SHAPE,
    sizes: tuple[int, ...] = (1, 2),
    scale: float = 1.0,
    attention_scale: float = 1.0,
) -> Path:
    """Files as Vidur writes them: every general operator takes what its tokens cost at the data sheet's best, attention
    0.02 ms + 0.02 us a token of context (decode) or its products (prefill), an all-reduce 0.02 ms and its bytes."""
    path.mkdir(parents=True, exist_ok=True)
    gpu = GPUS[GPU]
    model = {"n_head": shape.heads, "n_kv_head": shape.kv_heads, "n_embd": shape.hidden}
    mlp = pd.DataFrame([(tp, tokens) for tp in sizes for tokens in TOKENS], columns=[vidur_csv.TP, "num_tokens"])
    times = [vidur_csv.product_s(shape, gpu, tp, tokens) / MS for tp, tokens in mlp.to_numpy()]
    mlp = mlp.assign(**{column: scale * np.array(times) for column in GENERAL})
    facts = model | {"n_expanded_embd": shape.intermediate, "vocab_size": 32768, "use_gated_mlp": True}
    mlp.assign(**facts).to_csv(path / vidur_csv.MLP, index=False)
    decode = [(tp, b, c, 0, 0.02 + 2e-5 * b * c, np.nan) for tp in sizes for b in BATCHES for c in CONTEXTS]
    pairs = 2 * shape.heads * shape.head_dim / gpu.flops / MS
    prefill = [(tp, 1, 0, t, np.nan, 0.01 + pairs * t * t / tp) for tp in sizes for t in range(64, 513, 32)]
    names = [vidur_csv.TP, "batch_size", "kv_cache_size", "prefill_chunk_size", vidur_csv.DECODE, vidur_csv.PREFILL]
    attention = pd.DataFrame([*decode, *prefill], columns=names)
    attention[[vidur_csv.DECODE, vidur_csv.PREFILL]] *= scale * attention_scale
    attention["is_prefill"] = attention["prefill_chunk_size"] > 0
    renamed = {"n_q_head" if name == "n_head" else name: value for name, value in model.items()}
    attention.assign(block_size=16, max_model_len=4096, **renamed).to_csv(path / vidur_csv.ATTENTION, index=False)
    size = [tokens * shape.hidden * 2 for tokens in TOKENS]
    reduce = pd.DataFrame([(tp, tp, each) for tp in sizes if tp > 1 for each in size])
    reduce.columns = ["num_workers", "devices_per_node", "size"]
    reduce[vidur_csv.REDUCE] = scale * (0.02 + reduce["size"] / gpu.local_bytes_per_s / MS)
    reduce.assign(collective="all_reduce").to_csv(path / vidur_csv.ALL_REDUCE, index=False)
    return path


def edit(path: Path, change: Callable[[pd.DataFrame], object]) -> None:
    frame = pd.read_csv(path)
    changed = change(frame)
    (changed if isinstance(changed, pd.DataFrame) else frame).to_csv(path, index=False)


# ---- reading


def test_what_the_files_cover(tmp_path: Path) -> None:
    found = vidur_csv.read(SHAPE, GPU, 2, folder_of(tmp_path))
    assert found.batches.tolist() == list(BATCHES)
    assert found.contexts.tolist() == list(CONTEXTS)
    assert (found.prefills, found.tokens, found.context_step) == ((64, 512), (1, 512), 32)
    assert (found.block_tokens, found.vocab) == (16, 32768)


def test_one_gpu_needs_no_all_reduce(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / vidur_csv.ALL_REDUCE).unlink()
    assert vidur_csv.read(SHAPE, GPU, 1, folder).paths[2] == ""
    with pytest.raises(InputError, match=r"no all_reduce\.csv for h100_sxm"):
        vidur_csv.read(SHAPE, GPU, 2, folder)


def test_vidurs_own_tree_is_searched(tmp_path: Path) -> None:
    flat = folder_of(tmp_path / "flat")
    other = folder_of(tmp_path / "other", shape=model_shape("llama-2-70b"))
    compute = tmp_path / "tree" / "compute"
    for source, place in ((flat, "h100/Llama-3-8B"), (flat, "a100/Llama-3-8B"), (other, "h100/Llama-2-70b")):
        (compute / place).mkdir(parents=True)
        for name in (vidur_csv.MLP, vidur_csv.ATTENTION):
            shutil.copy(source / name, compute / place)
    network = tmp_path / "tree" / "network" / "h100_dgx"
    network.mkdir(parents=True)
    shutil.copy(flat / vidur_csv.ALL_REDUCE, network)
    paths = vidur_csv.read(SHAPE, GPU, 2, tmp_path / "tree").paths
    assert [Path(path).parent.name for path in paths[:3]] == ["Llama-3-8B", "Llama-3-8B", "h100_dgx"]
    assert all("/a100/" not in path for path in paths)
    shutil.copytree(compute / "h100/Llama-3-8B", compute / "h100/again")
    with pytest.raises(InputError, match=r"several mlp\.csv for h100_sxm: .*Llama-3-8B.* and .*again"):
        vidur_csv.read(SHAPE, GPU, 2, tmp_path / "tree")
    with pytest.raises(InputError, match=r"no mlp\.csv for l40s; there is .*Llama-3-8B/mlp\.csv"):
        vidur_csv.read(SHAPE, "l40s", 1, tmp_path / "tree")


@pytest.mark.parametrize(
    ("scale", "unit"), [(1000.0, "microseconds"), (0.001, "seconds")], ids=["microseconds", "seconds"]
)
def test_another_unit_is_noticed(scale: float, unit: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"must be in milliseconds, these look like {unit}") as caught:
        vidur_csv.read(SHAPE, GPU, 2, folder_of(tmp_path / "all", scale=scale))
    assert "mlp.csv" in str(caught.value)
    with pytest.raises(InputError, match=f"must be in milliseconds, these look like {unit}") as caught:
        vidur_csv.read(SHAPE, GPU, 2, folder_of(tmp_path / "attention", attention_scale=scale))
    assert "attention.csv" in str(caught.value)
    folder = folder_of(tmp_path / "network")
    edit(
        folder / vidur_csv.ALL_REDUCE, lambda frame: frame.assign(**{vidur_csv.REDUCE: frame[vidur_csv.REDUCE] * scale})
    )
    with pytest.raises(InputError, match=rf"all_reduce\.csv: .* these look like {unit}"):
        vidur_csv.read(SHAPE, GPU, 2, folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            vidur_csv.MLP,
            lambda f: f.drop(columns=GENERAL[0]),
            r"mlp\.csv: no column 'time_stats\.attn_pre_proj\.median'; m",
        ),
        (vidur_csv.MLP, lambda f: f.drop(columns="use_gated_mlp"), r"mlp\.csv: no column 'use_gated_mlp'"),
        (vidur_csv.MLP, lambda f: f.assign(n_embd=8192), r"mlp\.csv: measured with n_embd 8192; 4096 is asked for"),
        (vidur_csv.ATTENTION, lambda f: f.assign(n_q_head=7), r"attention\.csv: measured with n_q_head 7; 32 is asked"),
        (
            vidur_csv.ATTENTION,
            lambda f: f[f[vidur_csv.TP] == 1],
            r"attention\.csv: measured with num_tens.* 1; 2 is asked",
        ),
        (vidur_csv.ATTENTION, lambda f: f[f.is_prefill], r"attention\.csv: no rows of decode for"),
        (vidur_csv.ATTENTION, lambda f: f[~f.is_prefill], r"attention\.csv: no rows of prefill without a KV cache"),
        (
            vidur_csv.ATTENTION,
            lambda f: f[f.is_prefill | (f.batch_size > 2)],
            r"batches 3 to 16; they must begin with 1",
        ),
        (vidur_csv.ATTENTION, lambda f: f.assign(**{vidur_csv.DECODE: -1.0}), "median holds -1.0; times are numbers"),
        (vidur_csv.MLP, lambda f: f.assign(**{GENERAL[3]: "fast"}), "median holds fast; times are numbers"),
        (vidur_csv.MLP, lambda f: f.assign(**{GENERAL[3]: 0.0}), "median holds nothing but 0"),
        (
            vidur_csv.ALL_REDUCE,
            lambda f: f.assign(collective="send_recv"),
            r"collective send_recv; all_reduce is asked",
        ),
    ],
)
def test_bad_file_is_named_in_one_line(
    name: str, change: Callable[[pd.DataFrame], pd.DataFrame], message: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path)
    edit(folder / name, change)
    with pytest.raises(InputError, match=message) as caught:
        vidur_csv.read(SHAPE, GPU, 2, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'"a\n1,2'], ids=["empty", "binary", "open quote"])
def test_file_that_is_no_csv(content: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / vidur_csv.MLP).write_bytes(content)
    with pytest.raises(InputError, match=r"mlp\.csv: (not readable as CSV|no column)"):
        vidur_csv.read(SHAPE, GPU, 2, folder)


def test_folder_and_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such folder; it should hold mlp\.csv, attention\.csv"):
        vidur_csv.read(SHAPE, GPU, 2, tmp_path / "nowhere")
    with pytest.raises(InfeasibleError, match="32 attention heads do not split over tp 5"):
        vidur_csv.read(SHAPE, GPU, 5, tmp_path)
    with pytest.raises(InputError, match=r"mlp\.csv: measured with num_tensor_parallel_workers 1, 2; 4 is asked for"):
        vidur_csv.read(SHAPE, GPU, 4, folder_of(tmp_path))


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vidur", "vidur.logger"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"pip install 'rlhfless\[vidur\]'"):
        vidur.require()


# ---- the predictor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    pytest.importorskip("vidur.version", reason=EXTRA)
    return vidur.build(SHAPE, GPU, 2, folder_of(tmp_path_factory.mktemp("vidur")))


def test_iterations_are_the_sum_of_their_parts(made: Profile) -> None:
    """What Vidur adds up, in ms a layer: nine operators, attention with its 10 %, two all-reduces with their launch."""
    gpu = GPUS[GPU]

    def layer_ms(tokens: int, attention: float) -> float:
        general = LAYER_PARTS * vidur_csv.product_s(SHAPE, gpu, 2, tokens) / MS
        reduce = 0.02 + tokens * SHAPE.hidden * 2 / gpu.local_bytes_per_s / MS
        return general + attention + 2 * (reduce + 0.02)

    for batch, context in ((1, 64), (8, 256), (16, 512)):
        share = 1.1 if batch > 1 else 1.0
        tokens = -(-batch // 8) * 8  # rounded up to 8 in all but attention
        expected = SHAPE.layers * layer_ms(tokens, share * (0.02 + 2e-5 * batch * context))
        assert float(made.decode_iteration_s(batch, context)) / MS == pytest.approx(expected, rel=0.01)
    pairs_ms = 2 * SHAPE.heads * SHAPE.head_dim / gpu.flops / MS * 512**2 / 2
    assert float(made.prefill_s(512)) / MS == pytest.approx(SHAPE.layers * layer_ms(512, 0.01 + pairs_ms), rel=0.02)


def test_grid_ends_where_the_measurements_end(made: Profile) -> None:
    data = made.data
    assert (data.decode_batch[0], data.decode_batch[-1], data.max_slots) == (1, 16, 16)
    assert (data.decode_context[0], data.decode_context[-1]) == (32, 512)
    assert (data.prefill_tokens[0], data.prefill_tokens[-1], data.max_batched_tokens) == (64, 512, 512)
    with pytest.raises(InfeasibleError, match="exceed the decode grid of 512 tokens"):
        made.require_fit(256, 257)
    assert (data.kind, data.name) == ("vidur", "llama-3-8b_h100_sxm_tp2_vidur")
    assert any("batches 1 to 16 and contexts 32 to 512" in note for note in data.notes)
    assert data.kv_capacity_tokens == roofline.build(SHAPE, GPU, 2).data.kv_capacity_tokens


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_batch": 17}, "batches up to 17: measured from 1 to 16, and nothing is guessed beyond"),
        ({"max_batch": 1}, "batches up to 1: measured from 1 to 16"),
        ({"max_context": 513}, "contexts up to 513: measured from 32 to 512"),
        ({"max_prefill": 1024}, "tokens of a prefill iteration up to 1024: measured from 64 to 512"),
    ],
)
def test_nothing_is_guessed_beyond(limit: dict[str, int], message: str, tmp_path: Path) -> None:
    found = vidur_csv.read(SHAPE, GPU, 2, folder_of(tmp_path))
    with pytest.raises(InputError, match=message):
        vidur.profile_of(found, None, **limit)


def test_command_writes_a_profile_or_one_line(
    made: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = folder_of(tmp_path / "csv"), tmp_path / "llama-3-8b.json"
    config.write_bytes(model_config("llama-3-8b"))
    out = tmp_path / "profile.json"
    line = [sys.executable, "-m", "sim.profiles", "vidur", folder, "--model", config, "--gpu", "h100", "--tp", "2"]
    done = subprocess.run([*map(str, line), "--out", str(out)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert load(str(out)).to_json() == made.to_json()  # the same bytes on every run
    out.unlink()
    for arguments, message in (
        ((folder, "--model", "llama-3-8b", "--gpu", "h100", "--tp", 4), "error: .*mlp.csv: measured with num_tensor_"),
        ((folder, "--model", "nope", "--gpu", "h100"), "error: unknown model 'nope': known are " + models()[0]),
        ((folder, "--model", "llama-3-8b", "--gpu", "tpu"), "error: unknown GPU 'tpu': known are h100_sxm"),
        ((folder / "no", "--model", "llama-3-8b", "--gpu", "h100"), "error: .*no: no such folder"),
        ((folder, "--model", "llama-3-8b", "--gpu", "h100", "--max-batch", 64), "error: batches up to 64: measured"),
    ):
        code, printed, err = call(profiles, ["vidur", *map(str, arguments), "--out", str(out)], capsys)
        assert (code, printed, err.count("\n")) == (2, "", 1)
        assert re.match(message, err), err
        assert not out.exists()


# ---- the public measurements


def test_public_measurements_are_read() -> None:
    found = vidur_csv.read(model_shape("llama-2-70b"), "a100_sxm", 2, public("vidur"))
    assert found.batches.tolist() == list(range(1, 129))
    assert (found.contexts[0], found.contexts[-1], found.context_step) == (32, 4032, 32)
    assert (found.prefills, found.tokens) == ((64, 4096), (1, 4096))
    with pytest.raises(InputError, match=r"attention\.csv: measured with num_tensor_parallel_workers 2; 4 is asked"):
        vidur_csv.read(model_shape("llama-2-70b"), "a100_sxm", 4, public("vidur"))
    with pytest.raises(InputError, match=r"no attention\.csv for h100_sxm; there is .*a100"):
        vidur_csv.read(model_shape("llama-2-70b"), "h100_sxm", 2, public("vidur"))
    with pytest.raises(InputError, match=r"mlp\.csv: measured with n_head 64; 32 is asked for"):
        vidur_csv.read(model_shape("llama-3-8b"), "a100_sxm", 2, public("vidur"))


def test_public_measurements_lie_near_a_roofline_and_near_vidurs_simulator() -> None:
    pytest.importorskip("vidur.version", reason=EXTRA)
    from experiments import fidelity_vidur

    rows = fidelity_vidur.rows(public("vidur"), public("requests") / "splitwise_conv.csv", count=100)
    as_it_comes = [row for row in rows if "Vidur" not in row.name and "the same" not in row.name]
    assert len(as_it_comes) == 8
    assert all(row.median_error < fidelity_vidur.AIM for row in as_it_comes)
    without = next(row for row in rows if row.name.startswith("the same") and row.n > 1)
    assert without.median_error < 0.02  # two assumptions explain the rest
