"""Profiles: the shipped files, the closed forms over them, the providers."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.types.cluster import GPUS, LOCAL_LATENCY_S
from rlhfless.types.profile import Profile
from sim.profiles import common, load, names, roofline, tables
from sim.profiles.registry import model_config, model_shape, models, write_profile
from tests.profiles import shipped_fields

SHIPPED = names()
TOKEN_LIMIT = 3000
"""Longest decode run that a random case sums token by token."""

PUBLISHED_PARAMETERS = {
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
}
"""Parameter counts of the published checkpoints, from their safetensors headers."""


# --- the shipped files ---


def test_every_recipe_is_shipped_and_nothing_else() -> None:
    assert sorted(target.name for target in tables.TARGETS) == list(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_survives_json_both_ways(name: str) -> None:
    profile = load(name)
    again = Profile.from_json(profile.to_json())
    assert again.to_json() == profile.to_json()
    assert np.array_equal(again.row_s, profile.row_s)
    assert profile.data.name == name
    assert profile.data.gpu in GPUS


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_says_where_it_comes_from(name: str) -> None:
    data = load(name).data
    assert f"aiconfigurator-core {tables.PACKAGE_VERSION}" in data.origin
    assert f"python -m sim.profiles build {name}" in data.origin
    assert "Apache-2.0" in data.licence
    assert "NVIDIA aiconfigurator" in data.licence
    assert any("chosen, not measured" in note for note in data.notes)
    assert any("PCIe" in note for note in data.notes) == (data.gpu == "l40s" and data.tp > 1)


@pytest.mark.parametrize("name", SHIPPED)
def test_one_token_takes_no_less_than_reading_the_weights(name: str) -> None:
    data = load(name).data
    least_s = data.weight_bytes / (data.tp * GPUS[data.gpu].memory_bytes_per_s)
    assert least_s <= data.decode_s[0, 0] <= 3 * least_s


@pytest.mark.parametrize("name", SHIPPED)
def test_prefill_takes_no_less_than_its_multiplications_at_peak(name: str) -> None:
    data, shape = load(name).data, model_shape(name.split("_", maxsplit=1)[0])
    matrix = shape.layers * shape.matrix_per_layer
    least_s = 2 * matrix * data.prefill_tokens / (data.tp * GPUS[data.gpu].flops)
    assert np.all(data.prefill_s >= least_s)


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_and_kv_fit_the_memory(name: str) -> None:
    data = load(name).data
    held = data.weight_bytes + data.kv_capacity_tokens * data.kv_bytes_per_token
    room = data.tp * (GPUS[data.gpu].memory_bytes * common.UTILISATION - common.reserve_bytes(data.tp))
    assert held <= room < held + data.kv_bytes_per_token


def test_llama_70b_on_two_h100_has_little_room() -> None:
    assert 15_000 <= load("llama-2-70b_h100_sxm_tp2").data.kv_capacity_tokens <= 22_000


# --- the closed forms ---


@st.composite
def runs(draw: st.DrawFn) -> tuple[Profile, int, float, int]:
    profile = PROFILES[draw(st.sampled_from(SHIPPED))]
    batch = draw(st.integers(1, profile.data.max_slots))
    count = draw(st.integers(1, TOKEN_LIMIT))
    whole = st.integers(1, profile.max_context - count).map(float)
    context = draw(st.one_of(whole, st.floats(1.0, profile.max_context - count)))
    return profile, batch, context, count


PROFILES = {name: load(name) for name in SHIPPED}


@settings(max_examples=200, deadline=None)
@given(runs())
def test_decode_run_equals_the_sum_of_its_iterations(case: tuple[Profile, int, float, int]) -> None:
    profile, batch, context, count = case
    summed = math.fsum(profile.decode_iteration_s(batch, context + np.arange(count)))
    assert profile.decode_run_s(batch, context, count) == pytest.approx(summed, rel=1e-12, abs=0)


@settings(max_examples=100, deadline=None)
@given(runs())
def test_iterations_of_a_time_are_the_exact_inverse(case: tuple[Profile, int, float, int]) -> None:
    profile, batch, context, count = case
    time_s = profile.decode_run_s(batch, context, count)
    assert profile.decode_run_iterations(batch, context, time_s, count + 5) == count
    assert profile.decode_run_iterations(batch, context, math.nextafter(time_s, math.inf), count + 5) == count + 1
    assert profile.decode_run_iterations(batch, context, 2 * time_s, count) == count  # never more than `most`
    assert profile.decode_run_iterations(batch, context, 0.0, count) == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_iteration_is_the_table_at_grid_points_and_linear_between(name: str) -> None:
    profile = PROFILES[name]
    data = profile.data
    inside = data.decode_batch <= data.max_slots
    at_grid = profile.decode_iteration_s(data.decode_batch[inside, None], data.decode_context[None, :])
    np.testing.assert_allclose(at_grid, data.decode_s[inside], rtol=1e-14)
    corners = [profile.decode_iteration_s(b, c) for b in (32, 48) for c in (512, 768)]
    assert float(profile.decode_iteration_s(40, 640)) == pytest.approx(float(np.mean(corners)), rel=1e-14)
    assert profile.decode_iteration_s(7, 1) == profile.decode_iteration_s(7, common.CONTEXTS[0])


@pytest.mark.parametrize("name", SHIPPED)
def test_prefill_is_cut_into_iterations(name: str) -> None:
    profile = PROFILES[name]
    most = profile.data.max_batched_tokens
    whole_s, rest_s = (float(profile.prefill_s(tokens)) for tokens in (most, 700))
    assert float(profile.prefill_s(3 * most)) == pytest.approx(3 * whole_s)
    assert float(profile.prefill_s(2 * most + 700)) == pytest.approx(2 * whole_s + rest_s)
    np.testing.assert_array_equal(profile.prefill_s([0, 1]), [0.0, profile.data.prefill_s[0]])
    np.testing.assert_array_equal(profile.prefill_s(profile.data.prefill_tokens), profile.data.prefill_s)


@pytest.mark.parametrize("name", SHIPPED)
def test_an_iteration_that_prefills_and_decodes(name: str) -> None:
    """No cheaper than either alone, no dearer than both; where there is no KV to read, as dear as a prefill."""
    profile = PROFILES[name]
    for tokens, batch, context in ((1, 1, 20.0), (50, 7, 300.0), (700, 64, 2000.5), (3000, 200, 900.0)):
        decode_s, prefill_s = profile.decode_run_s(batch, context, 1), float(profile.prefill_s(tokens))
        mixed_s = profile.mixed_iteration_s(tokens, batch, context)
        assert max(decode_s, prefill_s) <= mixed_s
        together_s = float(profile.prefill_s(tokens + batch))
        assert mixed_s <= decode_s + together_s
        unread_s = profile.decode_run_s(batch, 1.0, 1)
        assert profile.mixed_iteration_s(tokens, batch, 1.0) == pytest.approx(max(unread_s, together_s))
    slow = Profile(data=replace(profile.data, iteration_overhead_s=0.5), speed=2.0)
    assert slow.mixed_iteration_s(50, 7, 300.0) == pytest.approx(2 * (profile.mixed_iteration_s(50, 7, 300.0) + 0.5))


def test_overhead_comes_on_top_of_every_iteration_and_speed_scales_all() -> None:
    fields = shipped_fields()
    plain = Profile.from_json(json.dumps(fields))
    slow = Profile(data=Profile.from_json(json.dumps(fields | {"iteration_overhead_s": 0.002})).data, speed=1.5)
    assert slow.decode_run_s(9, 300.0, 400) == pytest.approx(1.5 * (plain.decode_run_s(9, 300.0, 400) + 400 * 0.002))
    assert float(slow.prefill_s(10_000)) == pytest.approx(1.5 * (float(plain.prefill_s(10_000)) + 2 * 0.002))


def test_response_beyond_the_kv_cache_or_the_grid_is_refused() -> None:
    profile = PROFILES["llama-2-70b_h100_sxm_tp2"]
    profile.require_fit(1024, 8192)
    profile.require_fit(1024, 16384 - 1024)
    with pytest.raises(InfeasibleError, match="decode grid of 16384 tokens; lower the cap to at most 15360 or take a"):
        profile.require_fit(1024, 16384)
    with pytest.raises(InfeasibleError, match="decode grid of 16384 tokens; the prompt alone fills it: take a profile"):
        profile.require_fit(16384, 1)
    fields = shipped_fields("llama-2-70b_h100_sxm_tp2") | {"kv_capacity_tokens": 9000}
    for cap in (8192, 16384):  # the KV cache is the tighter limit, also where the grid is passed too
        with pytest.raises(InfeasibleError, match=r"KV cache of 9000 tokens; lower .* 7976 or .* more GPUs per actor"):
            Profile.from_json(json.dumps(fields)).require_fit(1024, cap)


# --- models and providers ---


@pytest.mark.parametrize("key", models())
def test_parameters_are_those_of_the_checkpoint(key: str) -> None:
    assert model_shape(key).parameters == PUBLISHED_PARAMETERS[key]


def test_kv_bytes_count_grouped_heads_and_copies() -> None:
    assert model_shape("llama-2-70b").kv_bytes_per_token(8) == 2 * 80 * 8 * 128 * 2
    shape = model_shape("qwen2.5-3b")
    assert shape.kv_bytes_per_token(2) == shape.kv_bytes_per_token(1) == 2 * 36 * 2 * 128 * 2
    assert shape.kv_bytes_per_token(4) == 2 * shape.kv_bytes_per_token(1)  # two KV heads on four ranks


@pytest.mark.parametrize("target", tables.TARGETS, ids=lambda target: target.name)
def test_roofline_is_near_the_tables(target: tables.Target) -> None:
    """Measured 0.68 to 1.17 (decode) and 0.68 to 1.30 (prefill); at tp 4 on PCIe from 0.26 on: slow all-reduces."""
    guess, known = roofline.build(model_shape(target.model), target.gpu, target.tp).data, load(target.name).data
    low = 0.2 if (target.gpu, target.tp) == ("l40s", 4) else 0.6
    used = known.decode_batch <= known.max_slots
    decode, prefill = (guess.decode_s / known.decode_s)[used], guess.prefill_s / known.prefill_s
    assert low < decode.min() <= decode.max() < 1.25
    assert low < prefill.min() <= prefill.max() < 1.4
    assert guess.kv_capacity_tokens == known.kv_capacity_tokens
    assert guess.kind == "roofline"
    assert guess.notes[0].startswith("Nothing was measured")


def test_roofline_parts_by_hand() -> None:
    shape, gpu = model_shape("llama-2-70b"), GPUS["h100_sxm"]
    # A ring of 4 sends 2 * 3/4 of 1000 hidden vectors, twice a layer.
    ring_s = LOCAL_LATENCY_S + 1.5 * 1000 * 8192 * 2 / (450e9 * roofline.LINK_EFFICIENCY)
    assert float(roofline.all_reduce_s(shape, gpu, 4, np.array(1000.0))) == pytest.approx(160 * ring_s)
    assert float(roofline.all_reduce_s(shape, gpu, 1, np.array(1000.0))) == 0.0
    # One more token of context costs its KV read; keys and values of two prompts do not see each other.
    one, two = (float(roofline.decode_s(shape, gpu, 2, np.array(8.0), np.array(float(c)))) for c in (1000, 1001))
    kv_s = 8 * shape.kv_bytes_per_token(2) / (2 * gpu.memory_bytes_per_s * roofline.MEMORY_EFFICIENCY)
    assert two - one == pytest.approx(kv_s, rel=1e-6)
    cap, twice = (float(roofline.prefill_s(shape, gpu, 8, np.array(float(t)))) for t in (1024, 2048))
    fixed = shape.layers * (roofline.LAYER_S + roofline.ALL_REDUCES_PER_LAYER * LOCAL_LATENCY_S)
    assert twice - fixed == pytest.approx(2 * (cap - fixed))


def test_running_maximum_counts_what_it_raised() -> None:
    result, raised, share = common.rising(np.array([[1.0, 2.0, 1.5], [1.1, 1.8, 4.0]]))
    np.testing.assert_array_equal(result, [[1.0, 2.0, 2.0], [1.1, 2.0, 4.0]])
    assert raised == 2
    assert share == pytest.approx(2.0 / 1.5 - 1)


@pytest.mark.parametrize("name", ["qwen2.5-7b_l40s_tp4", "llama-3-8b_h100_sxm_tp1"])
def test_rebuilding_gives_the_shipped_bytes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="rebuilding needs the extra: pip install 'rlhfless[profiles]'")
    (target,) = tables.chosen([name])
    write_profile(tables.build(target), tmp_path / "again.json")
    shipped = Path(tables.__file__).parent / "shipped" / f"{name}.json"
    assert (tmp_path / "again.json").read_bytes() == shipped.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"]


def test_building_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"pip install 'rlhfless\[profiles\]'"):
        tables.build(tables.TARGETS[0])


def test_every_measured_gpu_and_a_users_model(tmp_path: Path) -> None:
    """The tables answer for any config.json on any GPU of the catalogue that the package has measured."""
    pytest.importorskip("aiconfigurator_core", reason="this needs the extra: pip install 'rlhfless[profiles]'")
    config = tmp_path / "Mine" / "config.json"
    config.parent.mkdir()
    small = json.loads(model_config("qwen2.5-3b")) | {"num_hidden_layers": 12, "_name_or_path": "me/mine"}
    config.write_text(json.dumps(small))
    unmeasured = {"cpu", "l4", "a10g"}
    for gpu in unmeasured:
        with pytest.raises(InputError, match=f"aiconfigurator-core has no vllm measurements of {gpu}; it has h100_sxm"):
            tables.build_from(config, gpu, 1)
    for gpu in set(GPUS) - unmeasured:
        data = tables.build_from(config, gpu, 1).data
        assert (data.name, data.model, data.kind) == (f"mine_{gpu}_tp1", "me/mine", "tables")
        assert data.decode_s[0, 0] >= data.weight_bytes / GPUS[gpu].memory_bytes_per_s
        assert data.notes[-1].startswith("The model's position") or data.notes[-1] == common.START_NOTE
    same = tmp_path / "qwen2.5-3b.json"
    same.write_bytes(model_config("qwen2.5-3b"))
    again = json.loads(Profile(data=tables.build_from(same, "l40s", 2).data).to_json())
    assert again | {"origin": ""} == shipped_fields() | {"origin": ""}


def test_gpus_without_their_form_factor() -> None:
    assert [common.gpu_key(name) for name in ("a100", "h200", "l40s", "gb200")] == [
        "a100_sxm", "h200_sxm", "l40s", "gb200",
    ]  # fmt: skip
    with pytest.raises(InputError, match="unknown GPU 'v100': known are h100_sxm"):
        common.gpu_key("v100")


@pytest.mark.parametrize("gpu", [name for name in GPUS if name != "cpu"])
def test_roofline_of_every_gpu_of_the_catalogue(gpu: str) -> None:
    data = roofline.build(model_shape("qwen2.5-3b"), gpu, 1).data
    kind = GPUS[gpu]
    assert data.decode_s[0, 0] >= data.weight_bytes / kind.memory_bytes_per_s
    assert data.kv_capacity_tokens * data.kv_bytes_per_token < kind.memory_bytes
    assert any(word in kind.source for word in ("data sheet", "aiconfigurator"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), min_size=1, max_size=5))
def test_halfway_rising_rises_and_is_nearest(rows: list[list[float]]) -> None:
    """No rising table is nearer: for every pair that falls, the two must move by half of the fall between them."""
    values = np.array(rows)
    result, share = common.halfway_rising(values)
    assert all(np.all(np.diff(result, axis=axis) >= 0) for axis in (0, 1))
    least = 0.0
    for i, j in np.ndindex(values.shape):
        later = values[i:, j:]
        least = max(least, (values[i, j] - later.min()) / 2)
    assert np.abs(result - values).max() == pytest.approx(least)
    assert share == pytest.approx(np.abs(result / values - 1).max())
