"""Profiles from Vidur's measurements: CSVs of single operators, filled in by the predictor of vidur 0.0.26.

Vidur (Agrawal et al., MLSys 2024; github.com/microsoft/vidur, MIT) times every operator of a layer over tokens, and
attention over batch and context, and fits random forests to the medians. Here its `RandomForrestExecutionTimePredictor`
reads local files and answers for the grid of a Profile, which ends where the measurements end. Kept as Vidur has it:
layers only, without embedding, logits, sampling and the engine's own work; 0.02 ms for the launch of each all-reduce;
10 % on decode attention of grouped-query models for batches above 1. The package's compiled path charges those 10 % to
every model, so its Python path is used. Times are in milliseconds in the files; they leave as seconds. The package is
an optional extra and is imported only when a profile is built.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import make_dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rlhfless.errors import InputError
from rlhfless.types.profile import Profile
from sim.profiles.common import (
    CONTEXTS,
    PREFILL_TOKENS,
    PROMPT_CAP_TOKENS,
    START_NOTE,
    assemble,
    halfway_rising,
    memory_note,
)
from sim.profiles.model import ModelShape
from sim.profiles.vidur_csv import Measurements, read

PACKAGE = "vidur"
PACKAGE_VERSION = "0.0.26"
"""The version whose predictor is understood here."""
LICENCE = "that of the measurements; those of Vidur's repository: MIT, Copyright Microsoft Corporation"
TREES = 100
"""Trees of a forest (chosen: 250, Vidur's least, moves no figure of the A100 tables by more than 1.1 %)."""


def predictor(found: Measurements, *, context_step: int | None = None, trees: int = TREES) -> Any:
    """Vidur's predictor, trained on the files; takes seconds. `context_step`: tokens to which it rounds contexts up.

    Raises InputError where the package is missing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that it imports
        return _predictor(found, context_step or found.context_step, trees)


def _predictor(found: Measurements, context_step: int, trees: int) -> Any:
    require()
    from sklearn.ensemble import RandomForestRegressor
    from vidur.config import CacheConfig, RandomForrestExecutionTimePredictorConfig
    from vidur.execution_time_predictor.random_forrest_execution_time_predictor import (
        RandomForrestExecutionTimePredictor,
    )

    class Local(RandomForrestExecutionTimePredictor):  # type: ignore[misc]
        """Trains on local files; the same forests every time."""

        def _load_predictions_from_hf(self) -> Any:
            raise LookupError("nothing is fetched")

        def _get_input_files(self) -> tuple[str, str, str, str]:
            return found.paths

        def _get_estimator(self) -> Any:
            return RandomForestRegressor(random_state=0)

    with TemporaryDirectory() as cache:
        config = RandomForrestExecutionTimePredictorConfig(
            no_cache=True,
            cache_dir=cache,
            kv_cache_prediction_granularity=context_step,
            prediction_max_prefill_chunk_size=found.prefills[1],
            prediction_max_batch_size=int(found.batches[-1]),
            prediction_max_tokens_per_request=max(found.tokens[1], int(found.contexts[-1])) + context_step,
            k_fold_cv_splits=2,
            num_training_job_threads=1,
            num_estimators=[trees],
            max_depth=[32],
            min_samples_split=[2],
        )
        return Local(config, replica_config(found), CacheConfig(block_size=found.block_tokens))


def require() -> None:
    """Raise InputError unless the package is there in the version that is known here; keep it quiet."""
    try:
        import vidur.logger  # noqa: F401
    except ImportError:
        raise InputError(f"reading Vidur's measurements needs {PACKAGE}: pip install 'rlhfless[vidur]'") from None
    version = metadata.version(PACKAGE)
    if version != PACKAGE_VERSION:
        raise InputError(f"{PACKAGE} {version} is installed, {PACKAGE_VERSION} is needed; see rlhfless[vidur]")
    logging.getLogger("vidur").setLevel(logging.CRITICAL)  # it logs to stdout


def replica_config(found: Measurements) -> Any:
    """Vidur's description of an actor. The package finds models among the subclasses of its configuration by name."""
    from vidur.config import ReplicaConfig
    from vidur.config.model_config import BaseModelConfig, Llama2ModelConfig

    shape = found.shape
    fields = {
        "num_layers": shape.layers,
        "num_q_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "embedding_dim": shape.hidden,
        "mlp_hidden_dim": shape.intermediate,
        "vocab_size": found.vocab,
        "max_model_len": int(found.contexts[-1]),
    }
    known = sum(1 for _ in _subclasses(BaseModelConfig))
    name = f"{shape.key} {known}"  # no two of one process share a name
    make_dataclass(
        "Model",
        [(key, int, value) for key, value in fields.items()],
        bases=(Llama2ModelConfig,),
        namespace={"get_name": staticmethod(lambda: name)},
    )
    # device and host stand for any: they matter to memory, which is counted here, and to hosts of 8 GPUs
    return ReplicaConfig(
        model_name=name,
        num_pipeline_stages=1,
        tensor_parallel_size=found.tp,
        device="a100",
        network_device="a100_dgx",
    )


def _subclasses(of: Any) -> Iterable[Any]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


def iteration_timer(trained: Any) -> Callable[[Sequence[int], Sequence[int]], float]:
    """Seconds of one iteration: tokens to compute of each request, and tokens that it has in the cache."""
    from vidur.entities import Batch

    def seconds(tokens: Sequence[int], cached: Sequence[int]) -> float:
        batch = Batch(None, [None] * len(tokens), list(tokens), list(cached))
        return float(trained.get_execution_time(batch, 0).total_time)

    return seconds


def build(
    shape: ModelShape,
    gpu: str,
    tp: int,
    folder: Path,
    *,
    max_batch: int | None = None,
    max_context: int | None = None,
    max_prefill: int | None = None,
) -> Profile:
    """The profile of a model on `tp` GPUs from the files under `folder`, the same bytes on every run.

    Its grid is what was measured, or less where a limit is given. Raises InputError for a limit beyond that, and as
    `read` and `predictor` do.
    """
    found = read(shape, gpu, tp, folder)
    return profile_of(found, predictor(found), max_batch=max_batch, max_context=max_context, max_prefill=max_prefill)


def profile_of(
    found: Measurements,
    trained: Any,
    *,
    max_batch: int | None = None,
    max_context: int | None = None,
    max_prefill: int | None = None,
) -> Profile:
    """The profile that a predictor, trained on the files, gives. Raises InputError for a limit as `build` does."""
    shape, gpu, tp = found.shape, found.gpu, found.tp
    least_prefill = max(found.prefills[0], found.tokens[0])
    most_batch = _limit("batches", max_batch, 1, min(int(found.batches[-1]), found.tokens[1]))
    most_context = _limit("contexts", max_context, int(found.contexts[0]), int(found.contexts[-1]))
    most_prefill = _limit(
        "tokens of a prefill iteration", max_prefill, least_prefill, min(found.prefills[1], found.tokens[1])
    )
    seconds = iteration_timer(trained)
    batches = [each for each in found.batches.tolist() if each <= most_batch]
    contexts = _contexts(found, most_context)
    prefills = [
        tokens
        for tokens in sorted({least_prefill, *PREFILL_TOKENS, most_prefill})
        if least_prefill <= tokens <= most_prefill and not 0 < tokens % PROMPT_CAP_TOKENS < found.prefills[0]
    ]
    decode, decode_by = halfway_rising(
        np.array([[seconds([1] * batch, [context] * batch) for context in contexts] for batch in batches])
    )
    prompts = [_prompts(tokens) for tokens in prefills]
    prefill, prefill_by = halfway_rising(np.array([seconds(each, [0] * len(each)) for each in prompts]))
    return assemble(
        shape=shape,
        gpu=gpu,
        tp=tp,
        name=f"{shape.key}_{gpu}_tp{tp}_vidur",
        kind="vidur",
        decode_s=decode,
        prefill_s=prefill,
        batches=batches,
        contexts=contexts,
        prefill_tokens=prefills,
        origin=(
            f"Vidur CSVs ({', '.join(Path(path).name for path in found.paths if path)}) measured on {gpu}, medians, "
            f"filled in by the random forests of vidur {PACKAGE_VERSION}; python -m sim.profiles vidur FOLDER "
            f"--model {shape.key} --gpu {gpu} --tp {tp}"
        ),
        licence=LICENCE,
        notes=(
            f"Measured: decode attention at batches {found.batches[0]} to {found.batches[-1]} and contexts "
            f"{found.contexts[0]} to {found.contexts[-1]}, prefill attention of prompts of {found.prefills[0]} to "
            f"{found.prefills[1]} tokens, all else over {found.tokens[0]} to {found.tokens[1]} tokens an iteration. "
            "The grid ends there.",
            "As Vidur counts: layers alone, without embedding, logits, sampling and the engine's own work; "
            "iteration_overhead_s is 0 here and may be calibrated.",
            f"Figures that fall were moved to halfway between the running maximum and minimum, by at most "
            f"{decode_by:.1%} (decode) and {prefill_by:.1%} (prefill).",
            f"Prefill: up to {PROMPT_CAP_TOKENS} tokens are one sequence, more are sequences of {PROMPT_CAP_TOKENS}.",
            memory_note(shape, gpu, tp),
            START_NOTE,
        ),
    )


def _limit(what: str, asked: int | None, least: int, most: int) -> int:
    if asked is not None and not least < asked <= most:
        raise InputError(f"{what} up to {asked}: measured from {least} to {most}, and nothing is guessed beyond")
    return most if asked is None else asked


def _contexts(found: Measurements, most: int) -> list[int]:
    """Grid contexts: the shared ones where they were measured, and both ends."""
    measured = np.append(found.contexts[found.contexts < most], most)
    near = {int(measured[np.abs(measured - context).argmin()]) for context in CONTEXTS}
    return sorted({int(measured[0]), *near, int(measured[-1])})


def _prompts(tokens: int) -> list[int]:
    full, rest = divmod(tokens, PROMPT_CAP_TOKENS)
    return [PROMPT_CAP_TOKENS] * full + ([rest] if rest else [])
