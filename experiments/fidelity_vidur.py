"""`python -m experiments.fidelity_vidur`: our simulator against Vidur's, on the same measurements and requests.

Vidur 0.0.26 runs its own event loop with chunked prefill (its Sarathi scheduler), as vLLM does; ours runs `sim.engine`
on the profile that `sim.profiles.vidur` makes of the same CSVs. All requests are there at time 0 and are dealt to the
replicas in turn; each replica has the same slots, KV and tokens an iteration. What is compared is the makespan and when
each request ends. Metrics, plots and uploads of the package are off. One repair of the package: a request that it
restarts after running out of KV keeps its old progress and ends the run with an assertion; here it starts anew.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from experiments import options
from experiments.output import json_text, print_table
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, IntArray, ints
from rlhfless.types.profile import Profile
from sim.profiles import vidur, vidur_csv
from sim.profiles.calibrate import Observation, finish_s
from sim.profiles.registry import model_shape

MODEL, GPU, TP = "llama-2-70b", "a100_sxm", 2
"""What Vidur's public attention measurements are of."""
REQUESTS = 400
"""Requests compared (chosen: several times the slots)."""
REPLICAS = (1, 4)
COARSE_TOKENS = 256
"""The package's default: contexts are rounded up to multiples of it."""
BLOCK_TOKENS = 16
WATERMARK = 0.01
"""Share of the KV that Vidur leaves free when it admits a request: its default, and that of vLLM 0.8's first engine."""
AIM = 0.05
"""Error that is aimed at."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison."""

    name: str
    """What is compared."""
    n: int
    """Figures that the errors are over."""
    median_error: float
    """Median size of ours over Vidur's less 1."""
    p90_error: float
    """90th percentile of the sizes."""
    note: str
    """Conditions, and the error with its sign."""


def requests_of(path: Path, count: int, least_prompt: int, most_tokens: int) -> IntArray:
    """int[count, 2]: prompt and response tokens of the first requests of a CSV of Vidur's that lie within the profiled
    range. Raises InputError for a missing file or column, or too few."""
    try:
        frame = pd.read_csv(path)[["num_prefill_tokens", "num_decode_tokens"]]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: no requests with num_prefill_tokens and num_decode_tokens ({error})") from None
    lengths = frame.to_numpy(dtype=np.int64)
    fits = (lengths[:, 0] >= least_prompt) & (lengths[:, 1] >= 1) & (lengths.sum(axis=1) <= most_tokens)
    kept = ints(lengths[fits][:count])
    if len(kept) < count:
        raise InputError(f"{path}: {len(kept)} requests of {least_prompt} to {most_tokens} tokens, {count} are needed")
    return kept


def ours_s(profile: Profile, requests: IntArray, replicas: int) -> FloatArray:
    """float[requests]: when each ends in our simulator."""
    everything = Observation(
        prompt_tokens=ints(requests[:, 0]),
        response_tokens=ints(requests[:, 1:]),
        actors=(ints(np.arange(len(requests))),),
        seconds=1.0,
    )
    end_s = np.empty(len(requests))
    for replica in range(replicas):
        queue = ints(np.arange(replica, len(requests), replicas))
        end_s[queue] = finish_s(profile, everything, queue)
    return end_s


def theirs_s(
    trained: Any, config: Any, profile: Profile, requests: IntArray, replicas: int, watermark: float
) -> tuple[FloatArray, int]:
    """float[requests]: when each ends in Vidur's simulator, and how often it restarted one. `config`: its replica."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that the package imports
        return _theirs_s(trained, config, profile, requests, replicas, watermark)


def _theirs_s(
    trained: Any, config: Any, profile: Profile, requests: IntArray, replicas: int, watermark: float
) -> tuple[FloatArray, int]:
    from vidur.config import CacheConfig, ClusterConfig, MetricsConfig, SarathiSchedulerConfig, SimulationConfig
    from vidur.entities import Replica, Request
    from vidur.events import RequestArrivalEvent
    from vidur.simulator import Simulator

    class Restarting(Request):  # type: ignore[misc]
        """Forgets all progress when it is restarted."""

        def restart(self) -> None:
            super().restart()
            self._num_stage_processed_tokens = 0
            self._is_prefill_stage_complete = False

    data = profile.data
    cluster = ClusterConfig(
        num_replicas=replicas,
        replica_config=config,
        cache_config=CacheConfig(
            block_size=BLOCK_TOKENS,
            num_blocks=data.kv_capacity_tokens // BLOCK_TOKENS,
            watermark_blocks_fraction=watermark,
        ),
        replica_scheduler_config=SarathiSchedulerConfig(
            batch_size_cap=data.max_slots, chunk_size=data.max_batched_tokens
        ),
    )
    Replica._id = -1  # its global scheduler counts replicas from 0
    with _answering(trained), TemporaryDirectory() as folder:
        quiet = MetricsConfig(write_metrics=False, enable_chrome_trace=False, store_plots=False, output_dir=folder)
        simulator = Simulator(SimulationConfig(cluster_config=cluster, metrics_config=quiet))
        simulator._event_queue = []  # of its own made-up requests
        simulator._write_output = lambda: None
        arriving = [Restarting(0.0, prompt, response) for prompt, response in requests.tolist()]
        for request in arriving:
            simulator._add_event(RequestArrivalEvent(0.0, request))
        simulator.run()
    return np.array([request.completed_at for request in arriving]), sum(each.num_restarts for each in arriving)


@contextmanager
def _answering(trained: Any) -> Iterator[None]:
    """Every simulator that is built meanwhile uses this predictor instead of one that it would train."""
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry as Registry
    from vidur.types import ExecutionTimePredictorType as Kind

    own = Registry.get_class(Kind.RANDOM_FORREST)
    Registry.unregister(Kind.RANDOM_FORREST)
    Registry.register(Kind.RANDOM_FORREST, lambda **_: trained)
    try:
        yield
    finally:
        Registry.unregister(Kind.RANDOM_FORREST)
        Registry.register(Kind.RANDOM_FORREST, own)


def _uncached(step: int) -> Callable[[Any], list[tuple[int, int]]]:
    """Prompts that are not counted as their own cache, in place of the predictor's own look-up."""

    def params(batch: Any) -> list[tuple[int, int]]:
        pairs = zip(batch.num_q_tokens, batch.num_kv_tokens, strict=True)
        return [(ceil((held - new) / step) * step, new) for new, held in pairs if new != 1]

    return params


def rows(data: Path, requests: Path, count: int = REQUESTS) -> list[Row]:
    """Every comparison: one replica and four, KV that never binds and the KV that two A100 have, and what the largest
    differences come from.

    `data`: folder of Vidur's CSVs; `requests`: a CSV of request lengths. Raises InputError for what is missing.
    """
    found = vidur_csv.read(model_shape(MODEL), GPU, TP, data)
    fine, coarse = vidur.predictor(found), vidur.predictor(found, context_step=COARSE_TOKENS)
    uncached = copy(fine)
    uncached._get_batch_prefill_attention_params = _uncached(found.context_step)
    profile = vidur.profile_of(found, fine)
    roomy = _with_kv(profile, profile.data.max_slots * profile.max_context)
    asked = requests_of(requests, count, found.prefills[0], profile.max_context)
    config = vidur.replica_config(found)
    result: list[Row] = []

    def compare(what: str, trained: Any, ours: Profile, replicas: int, watermark: float = WATERMARK) -> None:
        ends_s = ours_s(ours, asked, replicas)
        theirs, restarts = theirs_s(trained, config, ours, asked, replicas, watermark)
        whole, each = ends_s.max() / theirs.max() - 1, ends_s / theirs - 1
        name = f"{what}, {replicas} replica{'s' if replicas > 1 else ''}"
        tail = f"{whole:+.2%}, {ends_s.max():.1f} s against {theirs.max():.1f} s, {restarts} restarts in Vidur"
        for part, off, note in ((": makespan", np.array([whole]), tail), (": ends", each, f"{np.median(each):+.2%}")):
            size = np.abs(off)
            result.append(
                Row(
                    name=name + part,
                    n=size.size,
                    median_error=float(np.median(size)),
                    p90_error=float(np.quantile(size, 0.9)),
                    note=f"median {note}" if size.size > 1 else note,
                )
            )

    for kv, ours in (("KV never binds", roomy), (f"KV of {TP} x {GPU}", profile)):
        for replicas in REPLICAS:
            compare(kv, coarse, ours, replicas)
    compare(f"KV never binds, Vidur rounds contexts to {found.context_step} tokens", fine, roomy, 1)
    compare("the same, and counts no prompt as its own cache", uncached, roomy, 1)
    compare(f"KV of {TP} x {GPU}, Vidur keeps no KV free", coarse, profile, 1, watermark=0.0)
    return result


def _with_kv(profile: Profile, tokens: int) -> Profile:
    return Profile(data=replace(profile.data, kv_capacity_tokens=tokens))


@app.command()
def compare_with_vidur(
    data: Annotated[Path, typer.Argument(help="Folder of Vidur's CSVs.")],
    requests: Annotated[Path, typer.Argument(help="CSV with num_prefill_tokens and num_decode_tokens.")],
    count: Annotated[int, typer.Option("--count", min=1, help="Requests.")] = REQUESTS,
    as_json: options.Json = False,
) -> None:
    """Compare our simulator with Vidur's on the same measurements and requests."""
    found = rows(data, requests, count)
    if as_json:
        print(json_text({"aim": AIM, "rows": found}), end="")
        return
    print_table(
        f"our simulator against vidur {vidur.PACKAGE_VERSION}: {MODEL} on {TP} x {GPU} (aim {AIM:.0%})",
        ("what", "n", "median error %", "90th percentile %", "note"),
        [[row.name, row.n, 100 * row.median_error, 100 * row.p90_error, row.note] for row in found],
    )


if __name__ == "__main__":
    run(app)
