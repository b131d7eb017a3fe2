"""Weights in a running engine: after every update it is the model that transformers sees, and never half of one."""

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends import weight_sync
from backends.engine import StepEngine
from backends.engine_types import EngineError, Finished, Request
from backends.kv_transfer import current_version
from backends.weight_sync import (
    Published,
    WeightVersionError,
    discard,
    load,
    publish,
    require_version,
)
from rlhfless.errors import InputError
from tests.step_engines import PROMPTS, Child, alone, config, gather, make_model, real, reference, requests

TOKENS = 24
"""Generated of each prompt: enough to tell models apart, few enough for transformers without a cache."""
TOLERANCE = 2e-4
"""Between log-probabilities of two float32 implementations (2.4e-5 was measured)."""


class Models:
    """Folders with models, what was published of them, and a process with torch and no engine."""

    def __init__(self, child: Child, base: Path, folder: Path) -> None:
        self.child = child
        self.folder = folder
        self.base = base
        self.reference = {f"v{seed}": child(make_model, folder / f"learner{seed}", seed) for seed in (2, 3)}
        self.run = folder / "run"
        self.published = {
            "v2": child(publish, self.reference["v2"], self.run, "v2"),
            "v3": child(_publish_state, self.reference["v3"], self.run, "v3", folder / "nudged"),
        }
        self.reference["v3"] = folder / "nudged"

    def expected(self, version: str, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        folder = self.base if version == "base" else self.reference[version]
        found: list[tuple[list[int], list[float]]] = self.child(reference, folder, prompts, TOKENS)
        return found


def _publish_state(source: Path, run: Path, version: str, saved: Path) -> Published:
    """What a learner does after an optimiser step: publish the tensors it holds. The same model goes to `saved`."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=random), alpha=0.02)
    lm.save_pretrained(saved)
    return publish(lm.state_dict(), run, version)


@pytest.fixture(scope="module")
def models(beside: Child, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(beside, tiny_model, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Child]:
    child = Child(config(models.base))
    try:
        yield child
    finally:
        assert child.close() == 0


# ---- beside the engine


def _generate(engine: StepEngine, prompts: list[list[int]]) -> list[Finished]:
    engine.submit(
        Request(response=number, token_ids=prompt, max_tokens=TOKENS, temperature=0)
        for number, prompt in enumerate(prompts)
    )
    ended = gather(engine, len(prompts))
    return [ended[number] for number in range(len(prompts))]


def _load(engine: StepEngine, published: Published) -> tuple[float, str, str]:
    took_s = load(engine, published)
    require_version(engine, published.version)
    return took_s, engine.weight_version, current_version("configured")


def _version(engine: StepEngine) -> str:
    return engine.weight_version


def _agree(ended: list[Finished], expected: list[tuple[list[int], list[float]]]) -> None:
    for one, (tokens, logprobs) in zip(ended, expected, strict=True):
        assert list(one.done.tokens) == tokens
        assert one.done.logprobs == pytest.approx(logprobs, abs=TOLERANCE)


# ---- loading


@pytest.mark.slow
@real
def test_after_every_update_the_engine_is_the_published_model(models: Models, engine: Child) -> None:
    """Several updates, by link and from tensors, there and back, with the same prompts: no KV survives either."""
    prompts = [*PROMPTS[:2], [9, 8, 7] * 30]
    expected = {version: models.expected(version, prompts) for version in ("base", "v2", "v3")}
    assert len({tuple(tokens) for each in expected.values() for tokens, _ in each[1:]}) == 6  # three different models
    first = engine(_generate, prompts)
    _agree(first, expected["base"])
    for version in ("v2", "v3", "v2", "v3"):
        took_s, named, namespace = engine(_load, models.published[version])
        assert took_s > 0
        assert named == namespace == version
        ended = engine(_generate, prompts)
        assert {one.weight_version for one in ended} == {version}
        assert [one.done.cached_tokens for one in ended] == [0, 0, 0]
        _agree(ended, expected[version])
        again = engine(_generate, prompts)  # from the cache, which is now of this version
        assert all(one.done.cached_tokens > 0 for one in again)
        _agree(again, expected[version])


def _reload(engine: StepEngine, published: list[Published], rounds: int) -> int:
    """Resident memory afterwards, bytes."""
    for number in range(rounds):
        load(engine, published[number % len(published)])
        _generate(engine, PROMPTS[:1])
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
@real
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_updates_do_not_fill_the_memory(models: Models, engine: Child) -> None:
    versions = [models.published["v2"], models.published["v3"]]
    before = engine(_reload, versions, 4)
    after = engine(_reload, versions, 20)
    one = versions[0].bytes
    assert after - before < 6 * one  # a leak would be 20 of them
    assert one > 9e6


def _refused(engine: StepEngine, published: Published) -> str:
    try:
        load(engine, published)
    except InputError as error:
        return str(error)
    return "loaded"


def _refused_while_running(engine: StepEngine, published: Published) -> tuple[str, int]:
    engine.submit(requests(2, 300, 0.0))
    try:
        return _refused(engine, published), len(engine.progress())
    finally:
        engine.abort(range(2))


def _reshaped(source: Published, run: Path, version: str, change: str) -> Published:
    """Published as any other weights, but not of the engine's model."""
    from safetensors.torch import load_file

    state = load_file(str(source.path / weight_sync.SINGLE))
    name = "model.layers.1.mlp.down_proj.weight"
    if change == "missing":
        del state[name]
    elif change == "extra":
        state["model.layers.9.mlp.down_proj.weight"] = state[name].clone()
    else:
        state[name] = state[name][:, :-1].contiguous()
    return publish(state, run, version)


def _copy(published: Published, folder: Path) -> Published:
    shutil.copytree(published.path, folder)
    file = folder / weight_sync.SINGLE
    file.chmod(file.stat().st_mode | stat.S_IWUSR)
    return Published(version=published.version, path=folder, bytes=published.bytes, digest=published.digest)


@pytest.mark.slow
@real
def test_what_cannot_be_loaded_leaves_the_engine_as_it_was(models: Models, engine: Child, tmp_path: Path) -> None:
    good = models.published["v2"]
    engine(_load, good)
    flipped, short, gone = (_copy(good, tmp_path / name) for name in ("flipped", "short", "gone"))
    file = flipped.path / weight_sync.SINGLE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    file = short.path / weight_sync.SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    discard(gone)
    discard(gone)
    refused = engine(_refused_while_running, models.published["v3"])
    assert "while 2 responses run" in refused[0]
    assert refused[1] == 2
    for bad, match in ((flipped, "has changed since"), (short, "has changed since"), (gone, "cannot read")):
        told = engine(_refused, bad)
        assert match in told
        assert "\n" not in told
    for change, match in (
        ("missing", "down_proj.weight is missing, the engine's model has [256, 512]"),
        ("extra", "layers.9.mlp.down_proj.weight is [256, 512], the engine's model has missing"),
        ("narrow", "down_proj.weight is [256, 511], the engine's model has [256, 512]"),
    ):
        other = models.child(_reshaped, good, tmp_path / "run", change, change)
        assert match in engine(_refused, other)
    assert engine(_version) == "v2"
    _agree(engine(_generate, PROMPTS[:2]), models.expected("v2", PROMPTS[:2]))


def _fail_in_mid_load(folder: Path, published: Published, how: str) -> list[str]:
    engine = StepEngine(config(folder))
    through = engine.collective

    def collective(method: str, **kwargs: Any) -> list[Any]:
        if how == "gone":
            shutil.rmtree(published.path)
        elif how == "submitted":
            engine.submit(requests(1, 300, 0.0))
        result = through(method, **kwargs)
        if how == "interrupted":
            raise KeyboardInterrupt
        return result

    engine.collective = collective  # type: ignore[method-assign]
    told = []
    for attempt in (
        lambda: load(engine, published),
        lambda: require_version(engine, published.version),
        lambda: require_version(engine, "default"),
        lambda: engine.submit(requests(1, 1, 0.0)),
    ):
        try:
            attempt()
        except (EngineError, KeyboardInterrupt) as error:
            told.append(f"{type(error).__name__}: {error}")
    return [*told, engine.weight_version]


@pytest.mark.slow
@real
@pytest.mark.parametrize("how", ["gone", "submitted", "interrupted"])
def test_a_half_loaded_engine_is_of_no_use_to_anyone(models: Models, tmp_path: Path, how: str) -> None:
    """The file goes between check and load; a response slips in; the caller is interrupted."""
    told = alone(_fail_in_mid_load, models.base, _copy(models.published["v2"], tmp_path / "v2"), how)
    if how == "interrupted":
        assert told[0] == "KeyboardInterrupt: "
    else:
        assert told[0].startswith("EngineError: weights v2 are not whole in the engine, which is closed: ")
    assert told[1:4] == [f"EngineError: engine of {models.base} is closed"] * 3
    assert told[4] == "loading-v2"


def _other_version(engine: StepEngine) -> str:
    with pytest.raises(WeightVersionError) as caught:
        require_version(engine, "v7")
    return str(caught.value)


@pytest.mark.slow
@real
def test_an_actor_on_another_version_is_told_apart(models: Models, engine: Child) -> None:
    engine(_load, models.published["v3"])
    assert engine(_other_version) == "the engine has weights v3, the plan asks for v7"


def _shard(folder: Path, saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(saved, max_shard_size="4MB")


@pytest.mark.slow
@real
def test_a_checkpoint_of_several_files_is_one_version(models: Models, engine: Child, tmp_path: Path) -> None:
    models.child(_shard, models.base, tmp_path / "sharded")
    published = models.child(publish, tmp_path / "sharded", tmp_path / "run", "many")
    names = sorted(path.name for path in published.path.iterdir())
    assert len(names) > 2
    assert weight_sync.INDEX in names
    assert "config.json" not in names
    engine(_load, published)
    _agree(engine(_generate, PROMPTS[:1]), models.expected("base", PROMPTS[:1]))
