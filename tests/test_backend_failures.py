"""What befalls actors in mid-step: every response still comes once and unchanged, and nothing is left running."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import ray_step
from backends.generation import Generation
from backends.invocation import Invocation
from backends.ray_step import RayStep
from backends.vllm_actor import Update
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from tests import ray_steps
from tests.ray_steps import alive, assert_gone, plan, real, workload
from tests.test_backend_ray import check

pytestmark = [pytest.mark.slow, real]
WORK = workload(40, n=2, cap=200)
HANG_S = 4.0


@pytest.fixture(scope="module")
def executor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ray_steps.executor(tiny_model, tmp_path_factory.mktemp("run"), hang_timeout_s=HANG_S) as made:
        made.lengths = ray_steps.lengths
        yield made


@pytest.fixture(scope="module")
def expected(executor: Any) -> list[list[int]]:
    """Tokens of the step when nothing happens."""
    report = executor.execute(plan("dp", WORK), WORK)
    assert report.counters.failures == 0
    return tokens(executor)


def tokens(executor: Any) -> list[list[int]]:
    return [one.tokens.tolist() for one in executor.results]


class Mishap:
    """Something that happens once, when an actor has reported so many tokens of responses that are not finished."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[RayStep, int], None], tokens: int = 60) -> None:
        self.happened = 0
        self.saved = self.pid = 0
        self.steps: list[tuple[RayStep, int]] = []
        update = Generation.update

        def watched(generation: Generation, index: int, news: Update) -> None:
            update(generation, index, news)
            wire = generation.wire
            assert isinstance(wire, RayStep)
            saved = sum(len(generation.responses[number].here) for number in generation._at[index])
            if not self.happened and saved >= tokens and index in wire._decode:
                self.happened, self.saved, self.pid = 1, saved, wire._decode[index].process.pid
                self.steps.append((wire, index))
                act(wire, index)

        monkeypatch.setattr(Generation, "update", watched)


def signal_to(sign: signal.Signals) -> Callable[[RayStep, int], None]:
    def act(step: RayStep, index: int) -> None:
        os.kill(step._decode[index].process.pid, sign)

    return act


def run(executor: Any, made: Plan, expected: list[list[int]]) -> StepReport:
    report = executor.execute(made, WORK)
    check_delivered(executor, made, report, expected)
    return report


def check_delivered(executor: Any, made: Plan, report: StepReport, expected: list[list[int]]) -> None:
    assert tokens(executor) == expected
    check(made, report, Outcome(response_tokens=ray_steps.lengths(WORK).response_tokens))
    assert {one.weight_version for one in executor.results} == {str(int(executor.weight_version) - 1)}
    assert all(alive(pid) for pid in executor.pids())


@pytest.mark.parametrize("policy", ["dp", "dp+pa"])
def test_a_killed_actor_is_survived(
    executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    mishap = Mishap(monkeypatch, signal_to(signal.SIGKILL))
    before = executor.pids()
    report = run(executor, plan(policy, WORK, tau=0.6), expected)
    assert mishap.happened
    assert report.counters.failures == 1
    assert report.counters.moves > 0
    assert sum(one.function == "decode" for one in report.invocations) == 2  # another has taken over
    assert_gone([mishap.pid])
    assert set(before) - {mishap.pid} <= set(executor.pids())
    ((step, dead),) = mishap.steps
    assert step.generation.actors[dead].accepted_tokens >= mishap.saved  # what was reported is not generated again


def test_a_hanging_actor_is_noticed_and_killed(
    executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    def stop(step: RayStep, index: int) -> None:
        stopped.append(step._decode[index].process.pid)
        os.kill(stopped[0], signal.SIGSTOP)

    Mishap(monkeypatch, stop)
    report = run(executor, plan("dp", WORK), expected)
    assert report.counters.failures == 1
    assert report.phases[0].duration_s > HANG_S
    assert_gone(stopped)


def test_the_last_actor_is_replaced(executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    mishap = Mishap(monkeypatch, signal_to(signal.SIGKILL))
    report = run(executor, plan("raw", WORK, actors=1), expected)
    assert mishap.happened
    assert report.counters.failures == 1
    assert sorted(one.index for one in report.invocations if one.function == "decode") == [0, 1]
    assert report.moves.sum() == 0


def test_decode_actors_do_the_work_of_a_dead_prefill_actor(
    executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = RayStep._submit

    def deadly(step: RayStep, invocation: Invocation, requests: Any) -> None:
        submit(step, invocation, requests)
        if invocation.function == "prefill":
            os.kill(invocation.process.pid, signal.SIGKILL)

    monkeypatch.setattr(RayStep, "_submit", deadly)
    report = run(executor, plan("dp", WORK), expected)
    assert report.counters.failures == 1
    assert report.counters.prefill_tokens == 0
    assert report.counters.decode_prefill_tokens >= WORK.prompt_tokens[::3].sum()


def test_a_process_that_died_between_steps_is_replaced(executor: Any, expected: list[list[int]]) -> None:
    os.kill(executor.pids()[0], signal.SIGKILL)
    run(executor, plan("dp", WORK), expected)


def test_redis_dies_in_mid_step_and_is_replaced_for_the_next(
    executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(executor, plan("dp", WORK), expected)  # both processes are up
    with monkeypatch.context() as patches:
        mishap = Mishap(patches, lambda *_: os.kill(executor._redis.pid, signal.SIGKILL))
        report = run(executor, plan("dp+pa", WORK, tau=0.4), expected)
        assert mishap.happened
        assert report.counters.failures == 0
    old = executor.pids()
    report = run(executor, plan("dp", WORK), expected)
    assert_gone(old)
    assert report.counters.decode_prefill_tokens == WORK.responses  # KV travels again


def test_an_interrupted_step_leaves_nothing_and_can_be_run_again(
    executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(executor, plan("dp", WORK), expected)
    version, before = executor.weight_version, executor.pids()
    assert len(before) == 2
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patches:
            Mishap(patches, lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                executor.execute(plan("dp", WORK), WORK)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert_gone(before)
    assert executor.pids() == []
    assert executor.weight_version == version
    run(executor, plan("raw", WORK, actors=1), expected)


DRIVER = """
import signal, sys
from pathlib import Path
from backends.ray_executor import RayExecutor
from tests import ray_steps
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell starts in the background
executor = RayExecutor(ray_steps.CLUSTER, ray_steps.config(Path(sys.argv[1]), Path(sys.argv[2])))
print(*ray_steps.family(), executor._processes._folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_killed_or_interrupted_takes_ray_and_redis_with_it(
    tiny_model: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    command = [sys.executable, "-c", DRIVER, str(tiny_model), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        *numbers, folder = driver.stdout.readline().split()
        pids = [int(number) for number in numbers]
        if sign == signal.SIGKILL:  # Ray's agents wait a minute for its server before they follow it
            pids = [pid for pid in pids if "Agent" not in Path(f"/proc/{pid}/cmdline").read_text()]
        try:
            assert len(pids) > 3
            assert all(alive(pid) for pid in pids)
            driver.send_signal(sign)
            driver.wait(30)
            assert_gone(pids)
        finally:
            driver.kill()
            shutil.rmtree(folder, ignore_errors=True)


def test_engines_that_cannot_start_fail_the_step_with_the_cause(
    executor: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_step, "MOST_REVIVALS", 0)
    executor.execute(plan("raw", WORK, actors=1), WORK)
    before, good = executor.pids(), executor.config
    executor.config = replace(good, kv_cache_bytes=1 << 16)  # a block of this model has 64 KiB
    try:
        with pytest.raises(ray_step.StepError, match=r"keep dying, decode 0 on GPUs \[0\]: .*cannot be built"):
            executor.execute(plan("raw", WORK, actors=1), WORK)
    finally:
        executor.config = good
    assert_gone(before)
    assert executor.pids() == []
