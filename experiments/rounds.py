"""Loops over steps that change what a step trains on: RollPacker's tail batching, APRIL's partial rollouts.

RollPacker (arXiv 2509.21009) issues more prompts, and more responses of each, than a step needs, and stops when enough
prompts have enough responses: the first to end. Prompts that are not among them are put off, without what they have;
once they fill a step they get a long round of their own, with no more responses than are needed, all to their ends.
APRIL (arXiv 2509.18521) issues more prompts than a step needs and stops when enough have all of their responses. What
runs then goes on in the next step, from the tokens that it has, with the step's new prompts behind it.

Assumed here: how many more (`MORE`); that a response of RollPacker's that is not in the trace is as long as one of the
same prompt in the epoch after, and that a prompt put off draws the same lengths in its long round; that prompts come
in the trace's order, across the borders of epochs; that the last steps, which have no more to issue, end what is left.
Both run on the pieces of the policy `dp`. Left out: RollPacker's planning of rewards and of training, and APRIL's
correction for old tokens.

A step delivers as many prompts and responses as one of the trace, and after the last step every prompt of the trace has
been delivered once, so means over steps compare with those of other policies; which responses, and when, does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

import numpy as np

from experiments.bench import PolicyRun, Setting, Steps
from rlhfless.accounting.metrics import summarize
from rlhfless.driver import StepRecord, run
from rlhfless.errors import InputError
from rlhfless.scheduler.lengths import HistoryEstimator, LengthHistory
from rlhfless.scheduler.planner import Planner
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, ints
from rlhfless.types.outcome import Outcome
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World

MORE = 1.25
"""Prompts that are issued over those that are wanted, and RollPacker's responses likewise (chosen: of 1.25, 1.5 and 2,
on the presets gsm8k and livecodebench with 3 actors, the fastest for RollPacker; APRIL is at most 2 % faster with 1.5
or 2, which train on 44 or 64 % old tokens, not 26)."""
PIECES = "dp"
"""Policy that carries the rounds out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The prompts of a trace in the order in which they come; columns [rows], a row being a prompt in one epoch."""

    workload: Workload
    """One that has all rows; its epoch and step say nothing."""
    epoch: IntArray
    """int[rows]: epoch of each."""
    lengths: IntArray
    """int[rows, n]: true lengths."""
    spare: IntArray
    """int[rows, n]: lengths of further responses: the prompt's own in the next epoch that has it."""
    wanted: int
    """Prompts of a step."""

    @classmethod
    def of(cls, steps: Steps) -> "Stream":
        """All steps in a row. Raises InputError unless they have as many prompts each."""
        sizes = sorted({workload.size for workload, _ in steps})
        if len(sizes) > 1:
            raise InputError(f"steps of {sizes[0]} to {sizes[-1]} prompts: rounds need all alike (--prompts-per-step)")
        works = [workload for workload, _ in steps]
        known = [workload.prompts for workload in works]
        answers = [workload.reference_tokens for workload in works if workload.reference_tokens is not None]
        ids = np.concatenate([workload.prompt_ids for workload in works])
        lengths = np.concatenate([outcome.response_tokens for _, outcome in steps])
        return cls(
            workload=replace(
                works[0],
                prompt_ids=ids,
                prompt_tokens=ints(np.concatenate([workload.prompt_tokens for workload in works])),
                reference_tokens=ints(np.concatenate(answers)) if len(answers) == len(works) else None,
                prompts=None if None in known else tuple(prompt for each in known if each for prompt in each),
                common_prefix_tokens=min(workload.common_prefix_tokens for workload in works),
            ),
            epoch=ints(np.repeat([workload.epoch for workload in works], sizes[0])),
            lengths=ints(lengths),
            spare=ints(lengths[_next_rows(ids.tolist())]),
            wanted=sizes[0],
        )

    @property
    def rows(self) -> int:
        """Prompts over all epochs."""
        return int(self.epoch.size)

    def round(self, number: int, rows: Sequence[int], n: int, epoch: int) -> tuple[Workload, Outcome]:
        """Step `number`: these rows with n responses each."""
        here, whole = np.array(rows), self.workload
        workload = replace(
            whole,
            step=number,
            epoch=epoch,
            prompt_ids=whole.prompt_ids[here],
            prompt_tokens=ints(whole.prompt_tokens[here]),
            reference_tokens=None if whole.reference_tokens is None else ints(whole.reference_tokens[here]),
            prompts=None if whole.prompts is None else tuple(whole.prompts[row] for row in rows),
            responses_per_prompt=n,
        )
        lengths = np.concatenate([self.lengths[here], self.spare[here]], axis=1)[:, :n]
        return workload, Outcome(response_tokens=ints(lengths))


def _next_rows(ids: Sequence[object]) -> list[int]:
    """For each row the next with the same id, the first again after the last."""
    first: dict[object, int] = {}
    following: dict[object, int] = {}
    found = [0] * len(ids)
    for row in range(len(ids) - 1, -1, -1):
        found[row] = following.get(ids[row], -1)
        following[ids[row]] = row
        first[ids[row]] = row
    return [first[ids[row]] if after < 0 else after for row, after in enumerate(found)]


def first_to_end(ends_s: FloatArray, wanted: int, n: int) -> BoolArray | None:
    """The first `n` responses of the first `wanted` prompts of which n have ended; None while there are fewer.

    `ends_s`: float[prompts, issued], infinite for what has not ended; gives bool[prompts, issued]. Of equal times the
    lowest number goes first.
    """
    order = np.argsort(ends_s, axis=1, kind="stable")[:, :n]
    done_s = np.take_along_axis(ends_s, order, axis=1)[:, -1]
    prompts = np.argsort(done_s, kind="stable")[:wanted]
    if not np.isfinite(done_s[prompts[-1]]):
        return None
    chosen = np.zeros(ends_s.shape, dtype=np.bool_)
    chosen[prompts[:, None], order[prompts]] = True
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a step issues."""

    rows: tuple[int, ...]
    """Prompts, as rows of the stream."""
    n: int
    """Responses of each."""
    begun: IntArray
    """int[prompts, n]: tokens that each brings."""


class Loop(Protocol):
    """What decides the rounds."""

    def issue(self) -> Round | None:
        """The next step's prompts; None when all have been delivered."""
        ...

    def take(self, issued: Round, trained: BoolArray, tokens: IntArray) -> int:
        """Learn what a step trained on, bool[prompts, n], and how many tokens its responses had at its end, int
        likewise; how many of these are thrown away."""
        ...


class TailBatching:
    """RollPacker's loop."""

    def __init__(self, rows: int, wanted: int, n: int) -> None:
        """`rows`: prompts that come, whole steps of them; a step delivers `wanted`, n responses each."""
        self.rows, self.wanted, self.n = rows, wanted, n
        self.next, self.put_off = 0, list[int]()

    def issue(self) -> Round | None:
        """See `Loop`: a long round when those put off fill one, or no more come than fill one."""
        if long := len(self.put_off) >= self.wanted or self.rows - self.next <= self.wanted:
            rows, self.put_off = self.put_off[: self.wanted], self.put_off[self.wanted :]
            rows += self._fresh(self.wanted - len(rows))
        else:
            rows = self._fresh(ceil(MORE * self.wanted))
        n = self.n if long else ceil(MORE * self.n)
        return Round(rows=tuple(rows), n=n, begun=ints(np.zeros((len(rows), n), dtype=np.int64))) if rows else None

    def take(self, issued: Round, trained: BoolArray, tokens: IntArray) -> int:
        """See `Loop`: all that is not trained on is thrown away."""
        self.put_off += [row for row, kept in zip(issued.rows, trained, strict=True) if not kept.any()]
        return int(tokens[~trained].sum())

    def _fresh(self, count: int) -> list[int]:
        begin, self.next = self.next, min(self.next + count, self.rows)
        return list(range(begin, self.next))


class PartialRollouts:
    """APRIL's loop."""

    def __init__(self, rows: int, wanted: int, n: int) -> None:
        """As of `TailBatching`."""
        self.rows, self.n, self.most = rows, n, ceil(MORE * wanted)
        self.next, self.begun = 0, dict[int, IntArray]()

    def issue(self) -> Round | None:
        """See `Loop`: what has begun, then others."""
        last = min(self.next + self.most - len(self.begun), self.rows)
        rows = (*self.begun, *range(self.next, last))
        self.next = last
        none = np.zeros(self.n, dtype=np.int64)
        return Round(rows=rows, n=self.n, begun=ints([self.begun.get(row, none) for row in rows])) if rows else None

    def take(self, issued: Round, trained: BoolArray, tokens: IntArray) -> int:
        """See `Loop`: nothing is thrown away."""
        left = zip(issued.rows, trained, tokens, strict=True)
        self.begun = {row: tokens_so_far for row, kept, tokens_so_far in left if not kept.any()}
        return 0


LOOPS: dict[str, Callable[[int, int, int], Loop]] = {"rollpacker": TailBatching, "april": PartialRollouts}
"""Loops by the name of their peer (`rlhfless.scheduler.peers.PEERS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsRun(PolicyRun):
    """A loop carried out until every prompt of the trace has been delivered; columns [steps]."""

    trained_tokens: IntArray
    """Response tokens that a step trains on."""
    off_policy_tokens: IntArray
    """Of these, drawn in an earlier step, from older weights."""
    decoded_tokens: IntArray
    """Response tokens that it generated."""
    wasted_tokens: IntArray
    """Of these, thrown away at its end."""
    issued_prompts: IntArray
    """Prompts that it began or went on with."""
    late_steps: IntArray
    """int[rows]: steps by which each prompt of the trace came later than in the trace's order, below 0 earlier."""

    @property
    def off_policy_share(self) -> float:
        """Of all tokens that were trained on."""
        return float(self.off_policy_tokens.sum() / self.trained_tokens.sum())

    @property
    def wasted_share(self) -> float:
        """Of all tokens that were generated."""
        return float(self.wasted_tokens.sum() / self.decoded_tokens.sum())

    @property
    def late_share(self) -> float:
        """Of all prompts, those that came in a later step."""
        return float((self.late_steps > 0).mean())


class _Unlearned(HistoryEstimator):
    """Never learns, since responses that stopped say little; the pieces need lengths for nothing but the first step's
    asking ahead."""

    def observe(self, report: StepReport) -> None:
        """Learns nothing."""


def simulate(
    name: str, steps: Steps, setting: Setting, *, actors: int, tick: Callable[[int], None] = lambda _: None
) -> RoundsRun:
    """Carry a loop out over the prompts of all steps, on a static number of actors.

    Raises InputError for an unknown loop or steps of different sizes, and what planner and executor raise.
    """
    if name not in LOOPS:
        raise InputError(f"unknown loop {name!r}: known are {', '.join(LOOPS)}")
    stream = Stream.of(steps)
    wanted, n = stream.wanted, stream.lengths.shape[1]
    loop = LOOPS[name](stream.rows, wanted, n)
    rounds: list[Round] = []
    outcomes: list[Outcome] = []
    trained: list[BoolArray] = []

    def enough(workload: Workload, ends_s: FloatArray) -> BoolArray | None:
        chosen = first_to_end(ends_s.reshape(trained[workload.step].shape), wanted, n)
        if chosen is None:
            return None
        trained[workload.step] = chosen
        return chosen.ravel()

    world = World(
        profile=setting.profile, outcome_of=lambda workload: outcomes[workload.step], speed_noise=setting.speed_noise,
        seed=setting.seed, begun_of=lambda workload: rounds[workload.step].begun, enough=enough,
    )  # fmt: skip
    executor = SimExecutor(cluster=setting.cluster, world=world)
    planner = Planner(
        replace(policy(PIECES), name=name),
        setting.planner_profile or setting.profile,
        setting.cluster,
        actors=actors,
        learner_gpus=setting.learner_gpus,
        estimator=_Unlearned(LengthHistory()),
        seed=setting.seed,
        start=setting.start,
    )
    records: list[StepRecord] = []
    columns: list[tuple[int, int, int, int, int]] = []
    late, epoch = np.zeros(stream.rows, dtype=np.int64), 0
    while (issued := loop.issue()) is not None:
        step, rows = len(records), np.array(issued.rows)
        epoch = max(epoch, int(stream.epoch[rows].max()))
        workload, outcome = stream.round(step, issued.rows, issued.n, epoch)
        rounds.append(issued)
        outcomes.append(outcome)
        trained.append(np.ones(issued.begun.shape, dtype=np.bool_))
        records += run(planner, executor, [workload])
        chosen, tokens = trained[step], records[step].report.tokens.reshape(issued.begun.shape)
        wasted = loop.take(issued, chosen, tokens)
        decoded = int((tokens - issued.begun).sum())
        columns.append((int(tokens[chosen].sum()), int(issued.begun[chosen].sum()), decoded, wasted, workload.size))
        done = rows[chosen.any(axis=1)]
        late[done] = step - done // wanted
        tick(1)
    executor.close()
    trained_tokens, off_policy_tokens, decoded_tokens, wasted_tokens, prompts = map(ints, zip(*columns, strict=True))
    return RoundsRun(
        records=tuple(records),
        summary=summarize([record.report for record in records], setting.usd_per_gpu_hour),
        trained_tokens=trained_tokens,
        off_policy_tokens=off_policy_tokens,
        decoded_tokens=decoded_tokens,
        wasted_tokens=wasted_tokens,
        issued_prompts=prompts,
        late_steps=ints(late),
    )
