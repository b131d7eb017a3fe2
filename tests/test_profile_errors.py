"""Profiles and model configs that are refused, and the command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhfless.errors import InfeasibleError, InputError, SchemaError
from rlhfless.types.profile import Profile
from sim.profiles import __main__ as command_line
from sim.profiles import load, names, roofline
from sim.profiles.model import parse_shape, read_shape
from sim.profiles.registry import model_config, model_shape, write_profile
from tests.commands import call
from tests.profiles import shipped_fields

SHIPPED = names()


# --- bad input ---


def bad_profile(**changes: object) -> str:
    return json.dumps({key: value for key, value in (shipped_fields() | changes).items() if value is not ...})


def grid(**cells: object) -> list[list[Any]]:
    values: list[list[Any]] = shipped_fields()["decode_s"]
    values[3][2] = cells["value"]
    return values


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        pytest.param("{", SchemaError, "not JSON", id="not JSON"),
        pytest.param("[1]", SchemaError, "schema None", id="a list"),
        pytest.param(bad_profile(schema=2), SchemaError, "schema 2 is not readable", id="another schema"),
        pytest.param(bad_profile(decode_s=...), SchemaError, "missing required field `decode_s`", id="missing column"),
        pytest.param(bad_profile(tp=...), SchemaError, "missing required field `tp`", id="missing field"),
        pytest.param(bad_profile(tp="two"), SchemaError, r"Expected `int`, got `str` - at `\$.tp`", id="wrong type"),
        pytest.param(bad_profile(weight_bytes=None), SchemaError, r"\$.weight_bytes", id="null number"),
        pytest.param(bad_profile(decode_s=grid(value=None)), InputError, "decode_s holds nan", id="null in the grid"),
        pytest.param(bad_profile(decode_s=grid(value=0)), InputError, "decode_s holds 0.0", id="zero latency"),
        pytest.param(
            bad_profile(decode_s=grid(value=1e-3)),
            InputError,
            "decode_s must not fall as the batch grows, which it does after batch 4, context 256",
            id="falling over the batch",
        ),
        pytest.param(
            bad_profile(decode_s=[[0.1, 0.2, 0.15, *[0.3] * 12]] * 21),
            InputError,
            "decode_s must not fall as the context grows, which it does after batch 1, context 128",
            id="falling over the context",
        ),
        pytest.param(
            bad_profile(prefill_s=[0.2, 0.1, *[0.3] * 14]),
            InputError,
            "prefill_s must not fall as the size grows, which it does after size 16",
            id="falling prefill",
        ),
        pytest.param(
            bad_profile(decode_batch=[2, *range(3, 23)]), InputError, "must begin at 1, not 2", id="no batch 1"
        ),
        pytest.param(bad_profile(decode_s=grid(value=[1])), SchemaError, r"\$.decode_s", id="ragged"),
        pytest.param(bad_profile(decode_s=[[0.1, 0.2]]), InputError, r"shape \(1, 2\), the grid needs", id="shape"),
        pytest.param(bad_profile(prefill_s=[0.1]), InputError, "differ in length", id="prefill length"),
        pytest.param(bad_profile(prefill_tokens=[1, 1]), InputError, "prefill_tokens must ascend", id="not ascending"),
        pytest.param(bad_profile(decode_batch=[1.5, 2]), SchemaError, "whole numbers", id="half a batch"),
        pytest.param(bad_profile(decode_context=[16]), InputError, "two grid points", id="one point"),
        pytest.param(bad_profile(max_slots=10_000), InputError, "beyond the decode grid", id="too many slots"),
        pytest.param(bad_profile(max_batched_tokens=10_000), InputError, "beyond the prefill", id="too many tokens"),
        pytest.param(bad_profile(kv_capacity_tokens=0), InputError, "must be above 0", id="no KV"),
        pytest.param(bad_profile(kv_capacity_tokens=10**30), InputError, "at most 1000000000000", id="endless KV"),
        pytest.param(bad_profile(max_slots=10**30), InputError, "beyond the decode grid", id="endless slots"),
        pytest.param(
            bad_profile(max_slots=10**8, decode_batch=[*shipped_fields()["decode_batch"][:-1], 10**8]),
            InputError,
            "max_slots is 100000000; it must be at most 65536",
            id="slots beyond memory",
        ),
        pytest.param(bad_profile(tp=10**30), InputError, "tp is 10{30}; it must be at most 1024", id="endless GPUs"),
        pytest.param(bad_profile(weight_bytes=1e300), InputError, "weight_bytes is 1e", id="endless weights"),
        pytest.param(bad_profile(cold_start_s=1e300), InputError, "cold_start_s is 1e", id="endless start"),
        pytest.param(bad_profile(prefill_s=[1e300] * 16), InputError, "at most 1000000 s", id="endless prefill"),
        pytest.param(bad_profile(decode_context=[16, 10**10]), InputError, "it must end at 1000000000", id="long grid"),
        pytest.param(bad_profile(decode_context=[16, 10**30]), SchemaError, r"\$\.decode_context", id="endless grid"),
        pytest.param(bad_profile(gpu="nope"), InputError, "unknown GPU 'nope': known are h100_sxm, .*, cpu", id="GPU"),
        pytest.param(
            bad_profile(kv_tokens=1), SchemaError, "unknown field 'kv_tokens'; known are schema", id="unknown"
        ),
        pytest.param("[" * 100_000, SchemaError, "not JSON", id="deep"),
        pytest.param(bad_profile(cold_start_s=-1), InputError, "must not be negative", id="negative time"),
    ],
)
def test_bad_profile_file_is_refused_in_one_line(
    text: str, kind: type[InputError], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load(str(path))
    assert caught.type is kind
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_profile_measured_without_a_gpu_loads() -> None:
    assert Profile.from_json(bad_profile(gpu="cpu")).data.gpu == "cpu"


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: cannot read the profile \(No such file"):
        load("nowhere.json")
    with pytest.raises(InputError, match="unknown profile 'qwen': known are llama-2-70b_h100_sxm_tp2, "):
        load("qwen")
    with pytest.raises(InputError, match="name of the profile is empty: known are llama-2-70b_h100_sxm_tp2, "):
        load("")
    with pytest.raises(InputError, match="name of the model config is empty"):
        read_shape(Path(""))
    with pytest.raises(InputError, match="name of the profile file to write is empty"):
        write_profile(load(SHIPPED[0]), Path(""))
    with pytest.raises(InputError, match="unknown model 'gpt'"):
        model_shape("gpt")
    with pytest.raises(InputError, match="cannot read the model config"):
        read_shape(Path("nowhere/config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"vocab_size": 0}, "vocab_size = 0; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_hidden_layers": 10**400}, "it must be a whole number from 1 to 1000000000"),
        ({"intermediate_size": 1.5}, r"intermediate_size = 1\.5"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"hidden_size": 3585}, "no multiple of num_attention_heads 28; give head_dim"),
        ({"num_experts": 64}, "num_experts = 64; only dense decoders"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not known; known are llama, qwen2"),
        ({"model_type": ...}, "model_type None"),
    ],
)
def test_bad_model_config_is_refused(changes: dict[str, object], message: str) -> None:
    config = json.loads(model_config("qwen2.5-7b")) | changes
    text = json.dumps({key: value for key, value in config.items() if value is not ...})
    with pytest.raises(InputError, match=message) as caught:
        parse_shape(text, "bad", "config.json")
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_model_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^config\.json: "):
        parse_shape(text, "bad", "config.json")


def test_explicit_head_dim_and_biases_are_counted() -> None:
    config = json.loads(model_config("llama-3-8b"))
    plain = parse_shape(json.dumps(config), "m", "m")
    wide = parse_shape(json.dumps(config | {"head_dim": 256}), "m", "m")
    assert wide.parameters - plain.parameters == 32 * 4096 * 128 * (2 * 32 + 2 * 8)
    biased = parse_shape(json.dumps(config | {"attention_bias": True, "mlp_bias": True}), "m", "m")
    assert biased.parameters - plain.parameters == 32 * ((32 + 16) * 128 + 4096 + 2 * 14336 + 4096)
    normed = parse_shape(json.dumps(config | {"model_type": "qwen3"}), "m", "m")
    assert normed.parameters - plain.parameters == 32 * 2 * 128


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "kind", "message"),
    [
        ("llama-2-70b", "h100_sxm", 1, InfeasibleError, r"128\.5 GiB of weights do not fit on 1 x h100_sxm"),
        ("qwen2.5-7b", "l40s", 8, InfeasibleError, "28 attention heads do not split over tp 8"),
        ("qwen2.5-7b", "l40s", 0, InputError, "tensor-parallel size 0"),
        ("qwen2.5-7b", "tpu", 1, InputError, "unknown GPU 'tpu': known are h100_sxm"),
    ],
)
def test_impossible_roofline_is_refused(model: str, gpu: str, tp: int, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        roofline.build(model_shape(model), gpu, tp)


def test_kv_heads_that_neither_split_nor_repeat_are_refused() -> None:
    config = json.loads(model_config("llama-3-8b")) | {"num_attention_heads": 36, "num_key_value_heads": 6}
    shape = parse_shape(json.dumps(config | {"head_dim": 128}), "m", "m")
    with pytest.raises(InfeasibleError, match="6 KV heads neither split over nor repeat on tp 4"):
        shape.require_split(4)


# --- the command ---


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sim.profiles", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


def test_list_prints_every_profile() -> None:
    done = command("list")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SHIPPED)
    assert all("…" not in line for line in lines)


def test_show_prints_origin_and_tables() -> None:
    done = command("show", "qwen2.5-3b_l40s_tp1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "aiconfigurator-core" in done.stdout
    assert "16384" in done.stdout


def test_roofline_command_writes_a_profile_that_loads(tmp_path: Path) -> None:
    config, out = tmp_path / "Llama-3-8B" / "config.json", tmp_path / "new" / "p.json"
    config.parent.mkdir()
    config.write_bytes(model_config("llama-3-8b"))
    done = command("roofline", str(config), "--gpu", "a100", "--tp", "2", "--out", str(out))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert load(str(out)).data.name == "llama-3-8b_a100_sxm_tp2_roofline"
    assert load(str(out)).to_json() == roofline.build(read_shape(config), "a100_sxm", 2).to_json()
    refused = command("roofline", "nope.json", "--gpu", "l40s", "--out", str(out))
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nope"), "error: unknown profile 'nope': known are llama-2-70b"),
        (("build", "nope"), "error: no recipe for profile 'nope': known are qwen2.5-3b_l40s_tp1"),
        (("roofline", "nope.json", "--gpu", "l40s", "--out", "x.json"), "error: nope.json: cannot read the model"),
        (("roofline", "nope.json", "--gpu", "l40s"), "error: Missing option '--out'"),
        (("tables", "nope.json", "--gpu", "l40s", "--out", "x.json"), "error: nope.json: cannot read the model"),
        (("tables", "CONFIG", "--gpu", "v100", "--out", "x.json"), "error: unknown GPU 'v100': known are h100_sxm"),
        (("show",), "error: Missing argument"),
        (("show", ""), "error: the name of the profile is empty"),
        (("roofline", "CONFIG", "--gpu", "l40s", "--out", ""), "error: the name of the profile file to write is empty"),
        (("roofline", "", "--gpu", "l40s", "--out", "x.json"), "error: the name of the model config is empty"),
        (("roofline", "CONFIG", "--gpu", "l40s", "--out", "FILE/x.json"), "error: FILE: a file is in the way; an out"),
        (("build", SHIPPED[0], "--out", "FILE"), "error: FILE: a file is in the way; an output folder is needed"),
        (("build", SHIPPED[0], "--out", "FILE/new/x"), "error: FILE: a file is in the way; an output folder is needed"),
    ],
)
def test_wrong_use_of_the_command_ends_in_one_line(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape, file = tmp_path / "qwen" / "config.json", tmp_path / "file"
    shape.parent.mkdir()
    shape.write_bytes(model_config("qwen2.5-3b"))
    file.write_text("")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    named = [a.replace("CONFIG", "../qwen/config.json").replace("FILE", "../file") for a in arguments]
    code, out, err = call(command_line, named, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message.replace("FILE", "../file"))
    assert list(folder.iterdir()) == []
    assert file.read_text() == ""


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file: a file is in the way"):
        write_profile(load(SHIPPED[0]), tmp_path / "file" / "p.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder: cannot write the profile \(Is a directory\)"):
        write_profile(load(SHIPPED[0]), tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_tables_of_a_users_profile_are_not_cut_away_from_a_terminal(tmp_path: Path) -> None:
    fields = shipped_fields()
    fields["decode_context"] = [16 + 1000 * i for i in range(60)]
    fields["decode_s"] = [[row[0]] * 60 for row in fields["decode_s"]]
    fields["origin"] = "see [profiles] " + "x" * 150
    (tmp_path / "long.json").write_text(json.dumps(fields))
    shown = command("show", str(tmp_path / "long.json")).stdout
    header = next(line for line in shown.splitlines() if line.split()[:1] == ["batch"])
    assert header.split()[1:] == [str(context) for context in fields["decode_context"]]
    assert "[profiles]" in shown
    assert "…" not in shown
