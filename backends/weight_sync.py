"""Weights with names: published once by the learner, loaded by every engine, never half (RLHFless §4.1, §5).

Two roads. By file: `publish` writes safetensors into a folder that the engines' hosts share, `load` brings them into a
running engine; it works everywhere. By NCCL or CUDA IPC, on GPUs: `transfer_config` prepares an engine, and `receive`
takes what the trainer's side of vLLM (`vllm.distributed.weight_transfer`) sends, without a file between.

A version is a name for one set of weights. Responses and KV carry it: as an engine's salt for cached KV, and as the
namespace of a KV connector.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backends import kv_transfer
from backends.engine import StepEngine
from backends.engine_types import EngineError
from backends.environment import require
from rlhfless.errors import InputError, RlhflessError

Shapes = dict[str, tuple[int, ...]]
"""Shape of every tensor, by its name in the checkpoint."""

SINGLE = "model.safetensors"
"""File of a version that was published from tensors."""
INDEX = "model.safetensors.index.json"
"""Says which file holds which tensor where a checkpoint has several."""
LOADING = "loading-"
"""Begins the version of an engine whose weights are changing, in place of a name that a plan could ask for."""
_VERSION = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""What can be a folder's name and part of a key of KV."""
_DERIVED = "rotary_emb.inv_freq"
"""End of names that old checkpoints carry and no engine reads: they follow from the config."""
_HEAD = "lm_head.weight"
"""Output head. A model that shares it with the embedding may be saved with it or without."""


class WeightVersionError(RlhflessError):
    """An engine has other weights than the plan asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One set of weights in a folder. Plain values: it may be sent to other hosts that see the same folder."""

    version: str
    """Name of the weights."""
    path: Path
    """Folder with the safetensors of this version and nothing else."""
    bytes: int
    """Bytes of its files."""
    digest: str
    """SHA-256 over names and contents of its files."""


# ---- publishing


def publish(weights: Path | Mapping[str, Any], folder: Path, version: str) -> Published:
    """Put weights under `folder`/`version`, in one step: who looks finds the whole of them or nothing.

    `weights` is a state dict of whole tensors under their Hugging Face names (of tensors that are one, such as tied
    embeddings, the first is kept), a safetensors file, or a folder with a checkpoint. Files are hard-linked where the
    file system can, else copied: write new ones, do not change them in place (`load` would refuse those).
    Publishing the same weights again changes nothing. Raises InputError for a version that cannot be a name or has
    other weights, for weights that are missing or no safetensors, and where the folder cannot be written.
    """
    _check_version(version)
    folder = folder.absolute()  # engines may run elsewhere
    where = folder / version
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder, prefix=f".{version}."))
        try:
            part.chmod(0o755)  # mkdtemp's own mode would hide the weights from engines of other users
            if isinstance(weights, Path):
                _link(weights, part)
            else:
                _save(weights, part / SINGLE)
            shapes(part)  # whole and readable, or it is not published
            made = Published(version=version, path=where, bytes=_size(part), digest=_digest(part))
            try:
                part.rename(where)
            except OSError:
                if not where.is_dir():
                    raise
                if _digest(where) != made.digest:
                    raise InputError(
                        f"weights {version}: {where} holds other weights; a version names one set, take another"
                    ) from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise InputError(f"weights {version}: cannot write {where} ({error.strerror or error})") from error
    return made


def discard(published: Published) -> None:
    """Delete a version that no engine will load any more; nothing happens where it is gone."""
    shutil.rmtree(published.path, ignore_errors=True)


def shapes(folder: Path) -> Shapes:
    """Shapes of the tensors in the safetensors of `folder`. Raises InputError where there are none, or not whole."""
    require("safetensors")
    from safetensors import SafetensorError, safe_open

    found: Shapes = {}
    files = [each for each in _files(folder) if each.suffix == ".safetensors"]
    if not files:
        raise InputError(f"weights: {folder} holds no .safetensors")
    for path in files:
        try:
            with safe_open(str(path), framework="np") as tensors:
                found.update((name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"weights: {path} is not a whole safetensors file ({error})") from None
    if not found:
        raise InputError(f"weights: {folder} holds no tensor")
    return found


# ---- loading


def load(engine: StepEngine, published: Published) -> float:
    """Bring weights into an idle engine, forget its KV, and name both; returns seconds, the check of the file included.

    Call it in the engine's process. Raises InputError, and leaves the engine as it was, while responses run, and for
    weights that are missing, changed since they were published, or not those of the engine's model. Raises EngineError
    for a failure in mid-load or a response that was submitted meanwhile: the engine is closed then, since its weights
    are of two versions.
    """
    started_s = time.monotonic()
    verify(published)
    _require_same_shapes(engine, published)
    _swap(
        engine,
        published.version,
        lambda: engine.collective("reload_weights", weights_path=str(published.path)),
    )
    return time.monotonic() - started_s


def verify(published: Published) -> None:
    """Raise InputError unless the files are there, and those that were published."""
    _check_version(published.version)
    try:
        found = _digest(published.path)
    except OSError as error:
        raise InputError(
            f"weights {published.version}: cannot read {published.path} ({error.strerror}); publish them where every "
            "host of an engine finds them"
        ) from None
    if found != published.digest:
        raise InputError(f"weights {published.version}: {published.path} has changed since it was published")


def require_version(engine: StepEngine, version: str) -> None:
    """Raise WeightVersionError unless the engine has exactly these weights, EngineError if it is closed or failed."""
    engine.counters()  # raises for an engine that could not start anyway
    if engine.weight_version != version:
        raise WeightVersionError(f"the engine has weights {engine.weight_version}, the plan asks for {version}")


def _swap(engine: StepEngine, version: str, bring: Callable[[], object]) -> None:
    """Let `bring` change the weights while the engine carries a version that nobody asks for."""
    engine.set_weight_version(f"{LOADING}{version}")  # the engine's own word that nothing runs
    try:
        bring()
        engine.reset_prefix_cache()
        kv_transfer.set_namespace(version)
        engine.set_weight_version(version)
    except BaseException as error:
        engine.close()
        if not isinstance(error, RlhflessError):
            raise
        raise EngineError(f"weights {version} are not whole in the engine, which is closed: {error}") from error


def _require_same_shapes(engine: StepEngine, published: Published) -> None:
    """vLLM only warns of tensors that are missing, and leaves the old ones in."""
    base = checkpoint(engine._config.model)
    config = json.loads((base / "config.json").read_text())
    ignored = {_HEAD} if config.get("tie_word_embeddings") else set()
    want, have = (
        {name: shape for name, shape in shapes(each).items() if name not in ignored and not name.endswith(_DERIVED)}
        for each in (base, published.path)
    )
    wrong = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
    if wrong:
        name = wrong[0]
        raise InputError(
            f"weights {published.version}: {name} is {_shape(have, name)}, the engine's model has {_shape(want, name)} "
            f"({len(wrong)} of {len(want)} tensors differ)"
        )


def checkpoint(model: str) -> Path:
    """The folder of the engine's own model, which may be a name in the local Hugging Face cache."""
    if Path(model).is_dir():
        return Path(model)
    from transformers.utils import cached_file

    try:
        return Path(cached_file(model, "config.json", local_files_only=True)).parent
    except OSError:
        raise InputError(f"weights: {model} is neither a folder nor in the local Hugging Face cache") from None


# ---- GPU to GPU


def transfer_config(backend: Literal["nccl", "ipc"] = "nccl") -> dict[str, str]:
    """Arguments of vLLM's WeightTransferConfig for the engine (`EngineArgs.weight_transfer_config`).

    nccl: the learner has GPUs of its own. ipc: it shares them with the engine, on one host.
    """
    return {"backend": backend}


def nccl_ranks(address: str, port: int, tps: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """For each of the actors with `tps` GPUs, what `join` needs; the trainer is rank 0 of 1 + sum(tps).

    `address` and `port` are the trainer's: an address of a network that the hosts share, never a public one, since
    NCCL's rendezvous asks nobody who they are. Raises InputError for a port or a size that cannot be.
    """
    if not address or not 0 < port < 1 << 16:
        raise InputError(f"weights over NCCL: {address!r}:{port} is not an address and a port from 1 to 65535")
    if not tps or min(tps) < 1:
        raise InputError(f"weights over NCCL: GPUs of the actors {list(tps)}, each must be at least 1")
    first = [1 + sum(tps[:actor]) for actor in range(len(tps))]
    size = 1 + sum(tps)
    return tuple(
        {"master_address": address, "master_port": port, "rank_offset": rank, "world_size": size, "packed": True}
        for rank in first
    )


def join(engine: StepEngine, ranks: Mapping[str, Any]) -> None:
    """Connect an engine to the trainer, once; returns when all of `nccl_ranks` have. With ipc, ranks = {}."""
    engine.collective("init_weight_transfer_engine", init_info=dict(ranks))


def update_info(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `receive` is told of tensors that the trainer will send in this order: names, types, shapes."""
    return {
        "names": list(state),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()],
        "shapes": [list(tensor.shape) for tensor in state.values()],
    }


def receive(engine: StepEngine, update: Mapping[str, Any], version: str) -> float:
    """As `load`, but the weights come from the trainer, which sends at the same time; returns seconds."""
    _check_version(version)
    started_s = time.monotonic()

    def bring() -> None:
        engine.collective("start_weight_update")
        engine.collective("update_weights", update_info=dict(update))
        engine.collective("finish_weight_update")

    _swap(engine, version, bring)
    return time.monotonic() - started_s


# ---- files


def _check_version(version: str) -> None:
    if not _VERSION.fullmatch(version) or version.startswith(LOADING):
        raise InputError(
            f"weights: version {version!r} must be 1 to 100 letters, digits, '.', '_' or '-', not begin with '.' or "
            f"{LOADING!r}"
        )


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX)])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _digest(folder: Path) -> str:
    """0.9 ms a MB (measured)."""
    total = hashlib.sha256()
    files = _files(folder)
    if not files:
        raise FileNotFoundError(2, "no such weights", str(folder))
    for path in files:
        with path.open("rb") as file:
            total.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _link(source: Path, part: Path) -> None:
    files = _files(source) if source.is_dir() else [source]
    if not files or not all(path.is_file() for path in files):
        raise InputError(f"weights: {source} is neither a safetensors file nor a folder with some")
    for path in files:
        target = part / (path.name if source.is_dir() else SINGLE)
        try:
            os.link(path.resolve(), target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, target)


def _save(state: Mapping[str, Any], path: Path) -> None:
    require("safetensors")
    from safetensors.torch import save_file

    seen: set[tuple[Any, ...]] = set()
    whole: dict[str, Any] = {}
    for name, tensor in state.items():
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if same not in seen:
            seen.add(same)
            flat = tensor.detach().cpu().contiguous()
            # a view into something larger, such as a fused buffer, is cut out of it
            whole[name] = flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()
    if not whole:
        raise InputError("weights: the state dict is empty")
    save_file(whole, str(path), metadata={"format": "pt"})
    with contextlib.suppress(OSError):
        path.chmod(0o444)


def _shape(shapes: Shapes, name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"
