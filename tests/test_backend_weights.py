"""Weights in a running engine: after every update it is the model that transformers sees, and never half of one."""

import importlib.util
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
    nccl_ranks,
    publish,
    receive,
    require_version,
    shapes,
    transfer_config,
    update_info,
    verify,
)
from rlhfless.errors import InputError
from tests.test_backend_engine import PROMPTS, Child, _reference, config, gather, requests

MISSING = [name for name in ("vllm", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
real = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'rlhfless[cpu]'"),
]
TOKENS = 24
"""Generated of each prompt: enough to tell models apart, few enough for transformers without a cache."""
TOLERANCE = 2e-4
"""Between log-probabilities of two float32 implementations (2.4e-5 was measured)."""


def both(function: Any) -> Any:
    for mark in real:
        function = mark(function)
    return function


class Models:
    """Folders with models, what was published of them, and a process with torch and no engine."""

    def __init__(self, folder: Path) -> None:
        self.child = Child()
        self.folder = folder
        self.base: str = self.child(_make, folder / "base", 1)
        self.reference = {f"v{seed}": self.child(_make, folder / f"learner{seed}", seed) for seed in (2, 3)}
        self.run = folder / "run"
        self.published = {
            "v2": self.child(publish, Path(self.reference["v2"]), self.run, "v2"),
            "v3": self.child(_publish_state, self.reference["v3"], self.run, "v3", folder / "nudged"),
        }
        self.reference["v3"] = str(folder / "nudged")

    def expected(self, version: str, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        folder = self.base if version == "base" else self.reference[version]
        found: list[tuple[list[int], list[float]]] = self.child(_reference, folder, prompts, TOKENS)
        return found


def _make(folder: Path, seed: int) -> str:
    from backends.tiny import make_tiny

    return str(make_tiny(folder, seed=seed))


def _publish_state(source: str, run: Path, version: str, saved: Path) -> Published:
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
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("weights"))
    try:
        yield made
    finally:
        made.child.close()


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


@both
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


@both
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


@both
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


def _fail_in_mid_load(folder: str, published: Published, how: str) -> list[str]:
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


@both
@pytest.mark.parametrize("how", ["gone", "submitted", "interrupted"])
def test_a_half_loaded_engine_is_of_no_use_to_anyone(models: Models, tmp_path: Path, how: str) -> None:
    """The file goes between check and load; a response slips in; the caller is interrupted."""
    child = Child()
    try:
        told = child(_fail_in_mid_load, models.base, _copy(models.published["v2"], tmp_path / "v2"), how)
    finally:
        assert child.close() == 0
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


@both
def test_an_actor_on_another_version_is_told_apart(models: Models, engine: Child) -> None:
    engine(_load, models.published["v3"])
    assert engine(_other_version) == "the engine has weights v3, the plan asks for v7"


# ---- publishing


def _publish_views(folder: Path) -> tuple[weight_sync.Shapes, bool, list[str]]:
    """Tensors that share memory: tied ones, and slices of a larger one."""
    import torch
    from safetensors.torch import load_file

    fused = torch.arange(24.0).reshape(6, 4)
    state = {
        "model.embed.weight": fused[:2],
        "model.other.weight": fused[2:],
        "model.turned.weight": fused.t(),
        "lm_head.weight": fused[:2],
        "half.weight": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    }
    published = publish(state, folder, "1")
    loaded = load_file(str(published.path / weight_sync.SINGLE))
    same = all(bool(torch.equal(loaded[name], state[name].detach())) for name in loaded)
    told = []
    for attempt in (
        lambda: publish({**state, "half.weight": torch.zeros(3, dtype=torch.bfloat16)}, folder, "1"),
        lambda: publish({}, folder, "2"),
    ):
        try:
            attempt()
        except InputError as error:
            told.append(str(error))
    assert publish(state, folder, "1") == published
    return shapes(published.path), same, told


@both
def test_tensors_are_published_whole_and_once(models: Models, tmp_path: Path) -> None:
    found, same, told = models.child(_publish_views, tmp_path)
    assert found == {
        "half.weight": (3,),
        "model.embed.weight": (2, 4),
        "model.other.weight": (4, 4),
        "model.turned.weight": (4, 6),
    }
    assert same
    assert "holds other weights; a version names one set" in told[0]
    assert "empty" in told[1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # nothing half-written, before or after


def _shard(folder: str, saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(saved, max_shard_size="4MB")


@both
def test_a_checkpoint_of_several_files_is_one_version(models: Models, engine: Child, tmp_path: Path) -> None:
    models.child(_shard, models.base, tmp_path / "sharded")
    published = models.child(publish, tmp_path / "sharded", tmp_path / "run", "many")
    names = sorted(path.name for path in published.path.iterdir())
    assert len(names) > 2
    assert weight_sync.INDEX in names
    assert "config.json" not in names
    engine(_load, published)
    _agree(engine(_generate, PROMPTS[:1]), models.expected("base", PROMPTS[:1]))


def _interrupted(models_folder: str, run: Path) -> list[str]:
    def broken(source: Path, part: Path) -> None:
        (part / weight_sync.SINGLE).write_bytes(b"half")
        raise KeyboardInterrupt

    kept, weight_sync._link = weight_sync._link, broken
    try:
        publish(Path(models_folder), run, "cut")
    except KeyboardInterrupt:
        return [path.name for path in run.iterdir()]
    finally:
        weight_sync._link = kept
    return ["published"]


@both
def test_an_interrupted_publication_leaves_nothing(models: Models, tmp_path: Path) -> None:
    assert models.child(_interrupted, models.base, tmp_path) == []


@both
def test_published_files_are_links_where_possible_and_changes_are_noticed(models: Models, tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    shutil.copyfile(models.published["v3"].path / weight_sync.SINGLE, source)
    published = models.child(publish, source, tmp_path / "run", "7")
    assert published.bytes == source.stat().st_size
    assert (published.path / weight_sync.SINGLE).samefile(source)
    models.child(verify, published)
    with source.open("r+b") as file:  # in place, through the link
        file.seek(-1, 2)
        file.write(b"\0\0")
    with pytest.raises(InputError, match="has changed since"):
        verify(published)


@both
def test_publishing_says_what_is_wrong(models: Models, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    for weights, match in ((bad, "not a whole safetensors file"), (tmp_path / "no", "neither"), (tmp_path, "not a")):
        with pytest.raises(InputError, match=match):
            publish(weights, tmp_path / "run", "1")
    with pytest.raises(InputError, match="cannot write"):
        publish(models.published["v2"].path, bad, "1")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("version", ["", ".", "..", "a/b", "-" * 101, "a b", "loading-3", "é", "1\n"])
def test_a_version_that_cannot_be_a_name_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="version"):
        publish(tmp_path, tmp_path, version)
    with pytest.raises(InputError, match="version"):
        verify(Published(version=version, path=tmp_path, bytes=0, digest=""))


# ---- GPU to GPU: only that vLLM understands what it is told


def _vllm_takes(folder: str, tps: list[int]) -> dict[str, Any]:
    import torch
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
    from vllm.engine.arg_utils import EngineArgs

    infos = [NCCLWeightTransferInitInfo(**each) for each in nccl_ranks("10.0.0.1", 5000, tps)]
    update = NCCLWeightTransferUpdateInfo(**update_info({"a.weight": torch.ones(2, 3, dtype=torch.bfloat16)}))
    IPCWeightTransferInitInfo()
    arguments = EngineArgs(model=folder, weight_transfer_config=transfer_config())
    return {
        "backends": [WeightTransferConfig(**transfer_config(one)).backend for one in ("nccl", "ipc")],
        "argument": arguments.weight_transfer_config.backend,
        "ranks": [(one.rank_offset, one.world_size, one.packed) for one in infos],
        "update": (update.names, update.dtype_names, update.shapes),
        "type": getattr(torch, update.dtype_names[0]) is torch.bfloat16,
    }


@both
def test_vllm_understands_the_settings_of_its_gpu_transfers(models: Models) -> None:
    assert models.child(_vllm_takes, models.base, [2, 1, 4]) == {
        "backends": ["nccl", "ipc"],
        "argument": "nccl",
        "ranks": [(1, 8, True), (3, 8, True), (4, 8, True)],
        "update": (["a.weight"], ["bfloat16"], [[2, 3]]),
        "type": True,
    }


class Recorder:
    """Stands where an engine would, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def set_weight_version(self, version: str) -> None:
        self.asked.append(version)

    def collective(self, method: str, **kwargs: Any) -> list[Any]:
        if kwargs.get("update_info") == {"bad": 1}:
            raise EngineError("a peer is gone")
        self.asked.append((method, kwargs) if kwargs else method)
        return [None]

    def reset_prefix_cache(self) -> None:
        self.asked.append("reset")

    def close(self) -> None:
        self.asked.append("close")


def test_received_weights_are_named_as_loaded_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.kv_transfer._PROCESS.version", None)
    engine: Any = Recorder()
    weight_sync.join(engine, {"rank_offset": 1})
    receive(engine, {"names": []}, "9")
    assert engine.asked == [
        ("init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}),
        "loading-9",
        "start_weight_update",
        ("update_weights", {"update_info": {"names": []}}),
        "finish_weight_update",
        "reset",
        "9",
    ]
    assert current_version("configured") == "9"
    broken: Any = Recorder()
    with pytest.raises(EngineError, match=r"weights 10 are not whole .* a peer is gone"):
        receive(broken, {"bad": 1}, "10")
    assert broken.asked == ["loading-10", "start_weight_update", "close"]
    assert current_version("configured") == "9"


@pytest.mark.parametrize(("address", "port", "tps"), [("", 5, [1]), ("h", 0, [1]), ("h", 5, []), ("h", 5, [1, 0])])
def test_ranks_that_cannot_be_are_refused(address: str, port: int, tps: list[int]) -> None:
    with pytest.raises(InputError, match="weights over NCCL"):
        nccl_ranks(address, port, tps)
