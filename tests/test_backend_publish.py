"""Weights on their way: published whole and once, or sent from GPU to GPU as vLLM understands it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from backends import weight_sync
from backends.engine_types import EngineError
from backends.kv_transfer import current_version
from backends.weight_sync import (
    Published,
    nccl_ranks,
    publish,
    receive,
    shapes,
    transfer_config,
    update_info,
    verify,
)
from rlhfless.errors import InputError
from tests.step_engines import Child, real

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


@pytest.mark.slow
@real
def test_tensors_are_published_whole_and_once(beside: Child, tmp_path: Path) -> None:
    found, same, told = beside(_publish_views, tmp_path)
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


def _interrupted(model: Path, run: Path) -> list[str]:
    def broken(source: Path, part: Path) -> None:
        (part / weight_sync.SINGLE).write_bytes(b"half")
        raise KeyboardInterrupt

    kept, weight_sync._link = weight_sync._link, broken
    try:
        publish(model, run, "cut")
    except KeyboardInterrupt:
        return [path.name for path in run.iterdir()]
    finally:
        weight_sync._link = kept
    return ["published"]


@pytest.mark.slow
@real
def test_an_interrupted_publication_leaves_nothing(beside: Child, tiny_model: Path, tmp_path: Path) -> None:
    assert beside(_interrupted, tiny_model, tmp_path) == []


@pytest.mark.slow
@real
def test_published_files_are_links_where_possible_and_changes_are_noticed(
    beside: Child, tiny_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model.safetensors"
    shutil.copyfile(tiny_model / weight_sync.SINGLE, source)
    published = beside(publish, source, tmp_path / "run", "7")
    assert published.bytes == source.stat().st_size
    assert (published.path / weight_sync.SINGLE).samefile(source)
    beside(verify, published)
    with source.open("r+b") as file:  # in place, through the link
        file.seek(-1, 2)
        file.write(b"\0\0")
    with pytest.raises(InputError, match="has changed since"):
        verify(published)


@pytest.mark.slow
@real
def test_publishing_says_what_is_wrong(tiny_model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    for weights, match in ((bad, "not a whole safetensors file"), (tmp_path / "no", "neither"), (tmp_path, "not a")):
        with pytest.raises(InputError, match=match):
            publish(weights, tmp_path / "run", "1")
    with pytest.raises(InputError, match="cannot write"):
        publish(tiny_model, bad, "1")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("version", ["", ".", "..", "a/b", "-" * 101, "a b", "loading-3", "é", "1\n"])
def test_a_version_that_cannot_be_a_name_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="version"):
        publish(tmp_path, tmp_path, version)
    with pytest.raises(InputError, match="version"):
        verify(Published(version=version, path=tmp_path, bytes=0, digest=""))


# ---- GPU to GPU: only that vLLM understands what it is told


def _vllm_takes(folder: Path, tps: list[int]) -> dict[str, Any]:
    import torch
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
    from vllm.engine.arg_utils import EngineArgs

    infos = [NCCLWeightTransferInitInfo(**each) for each in nccl_ranks("10.0.0.1", 5000, tps)]
    update = NCCLWeightTransferUpdateInfo(**update_info({"a.weight": torch.ones(2, 3, dtype=torch.bfloat16)}))
    IPCWeightTransferInitInfo()
    arguments = EngineArgs(model=str(folder), weight_transfer_config=transfer_config())
    return {
        "backends": [WeightTransferConfig(**transfer_config(one)).backend for one in ("nccl", "ipc")],
        "argument": arguments.weight_transfer_config.backend,
        "ranks": [(one.rank_offset, one.world_size, one.packed) for one in infos],
        "update": (update.names, update.dtype_names, update.shapes),
        "type": getattr(torch, update.dtype_names[0]) is torch.bfloat16,
    }


@pytest.mark.slow
@real
def test_vllm_understands_the_settings_of_its_gpu_transfers(beside: Child, tiny_model: Path) -> None:
    assert beside(_vllm_takes, tiny_model, [2, 1, 4]) == {
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
