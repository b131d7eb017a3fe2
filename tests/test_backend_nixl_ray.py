"""Steps on Ray with KV by NIXL: a prefix is computed once, what is cut goes on with its KV, tokens stay the same."""

import importlib.util
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfless.types.plan import Plan
from rlhfless.types.workload import Workload
from tests import ray_steps
from tests.ray_steps import BLOCK, HEADER, execute_until_cut, lengths, long_tails, plan, workload

LACKING = [*ray_steps.MISSING, *(["nixl"] if importlib.util.find_spec("nixl") is None else [])]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}: pip install 'rlhfless[cpu,nixl]'"),
]


@pytest.fixture(scope="module")
def executor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ray_steps.executor(tiny_model, tmp_path_factory.mktemp("run"), kv="nixl") as made:
        yield made


def tokens(executor: Any) -> list[list[int]]:
    return [one.tokens.tolist() for one in executor.results]


def apart(made: Plan) -> Plan:
    """The plan with a GPU of its own for the prefill actor, and processes that end with their work."""
    placement = replace(made.placement, learner=(2,), decode=((0,), (1,)), preparation=())
    return replace(made, placement=placement, start="cold")


def test_each_distinct_prefix_is_computed_once_over_all_actors(executor: Any) -> None:
    """By vLLM's own count, step after step, each with weights of another name."""
    work = workload(20)
    executor.lengths = lengths
    made = plan("dp", work)
    executor.execute(plan("raw", work), work)
    expected = tokens(executor)
    for _ in range(2):
        counters = executor.execute(made, work).counters
        assert counters.prefill_tokens == computed_once(work)
        assert (counters.decode_prefill_tokens, counters.recomputed_tokens) == (work.responses, 0)
        cached = [one.cached_tokens for one in executor.results]
        assert cached == [int(work.prompt_tokens[response // 2]) - 1 for response in range(work.responses)]
        assert tokens(executor) == expected
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    ours = [line.split() for line in listening.splitlines() if any(f"pid={pid}," in line for pid in executor.pids())]
    assert ours
    assert {fields[3].rpartition(":")[0] for fields in ours} <= {"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"}


def test_what_is_cut_goes_on_with_its_kv(executor: Any) -> None:
    work = workload(0)
    made = plan("rlhfless", work)
    executor.lengths = long_tails(made, work)
    executor.execute(plan("raw", work), work)
    expected = tokens(executor)
    check_cut(execute_until_cut(executor, made, work), work)
    assert tokens(executor) == expected


def test_cold_processes_end_once_their_kv_is_read(executor: Any) -> None:
    work = workload(0)
    made = apart(plan("rlhfless", work))
    assert made.prefill is not None
    executor.lengths = long_tails(made, work)
    executor.execute(plan("raw", work), work)
    expected = tokens(executor)
    report = execute_until_cut(executor, made, work)
    check_cut(report, work)
    assert tokens(executor) == expected
    readers = {(int(made.prefill.prefix_of[r // 2]), at) for at, one in enumerate(made.actors) for r in one.responses}
    assert report.counters.prefill_tokens == computed_once(work) + len(readers) - made.prefill.distinct
    cut = next(at for at, one in enumerate(made.actors) if (report.actor[one.responses] != at).any())
    for one in report.invocations:
        if one.function == "prefill" or (one.function, one.index) == ("decode", cut):
            assert one.spans[-1].activity == "send-kv"
            assert one.end_s < report.phases[0].end_s
    assert executor.pids() == []


def computed_once(work: Workload) -> int:
    """Tokens of all distinct prompts, whose first block is the same."""
    assert work.prompts is not None
    return HEADER + sum(len(prompt) - HEADER for prompt in {tuple(prompt.tolist()) for prompt in work.prompts})


def check_cut(report: Any, work: Workload) -> None:
    counters = report.counters
    assert (counters.cuts, counters.failures, counters.decode_prefill_tokens) == (1, 0, work.responses)
    assert counters.moved_kv_bytes > 0
    # of each moved response, what lies beyond whole blocks is computed again, and no more
    assert counters.recomputed_tokens <= BLOCK * counters.moves
