"""Named policies: a table of which piece each one uses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from rlhfless.errors import InputError
from rlhfless.types.plan import Hosting, Start

Assignment = Literal[
    "sorted-even", "dealt", "shuffled-even", "least-in-flight", "frontier",
    "time-balanced", "skew-split", "tail-isolated", "longest-first", "probes-first",
]  # fmt: skip
"""A rule of `rlhfless.scheduler.assignment`; frontier: `rlhfless.scheduler.frontier`, which sizes groups and actors."""

FRONTIER = "frontier"
"""Policy that chooses groups, their number and the sizes of actors together."""
Migration = Literal["cut-and-migrate", "global-cut", "elastic", "repack", "seer"]
"""A rule of `rlhfless.scheduler.migration`."""

ORACLE = "oracle:"
"""Prefix of a policy's name that marks one whose length estimator was given the true lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which piece makes each decision of a step. Numbers (lambda, tau, static N) are the planner's."""

    name: str
    """What commands and results call it."""
    summary: str
    """One sentence for help texts and captions."""
    assignment: Assignment
    """Who decodes what."""
    dedup: bool
    """Whether a prefill actor computes shared prefixes once (RLHFless §4.2)."""
    scale: bool
    """Whether the number of actors is chosen each step (§4.4); otherwise it is static."""
    migration: Migration | None
    """Mid-step rule."""
    hosting: Hosting
    """How GPUs are held."""
    start: Start
    """How functions start."""
    prefix_caching: bool
    """Whether a decode actor keeps the KV of prompts that it has seen in the step."""
    oracle: bool = False
    """Whether its estimator knows the true lengths; the caller must then supply it."""


def _static(
    name: str,
    summary: str,
    assignment: Assignment = "shuffled-even",
    dedup: bool = False,
    migration: Migration | None = None,
    hosting: Hosting = "serverless",
) -> Policy:
    return Policy(
        name=name,
        summary=summary,
        assignment=assignment,
        dedup=dedup,
        scale=False,
        migration=migration,
        hosting=hosting,
        start="warm",
        prefix_caching=True,
    )


_PLACED = _static(
    "dp+pa",
    "dp, with prompts sorted by expected length and cut-and-migrate (RLHFless §4.3).",
    assignment="sorted-even",
    dedup=True,
    migration="cut-and-migrate",
)

_PEERS: tuple[tuple[str, str, Assignment, Migration | None], ...] = (
    ("rhymerl", "dp, with ranked prompts in groups of equal time (RhymeRL).", "time-balanced", None),
    ("streamrl", "dp, with the longest fifth of the prompts on actors of their own (StreamRL).", "skew-split", None),
    ("tailsieve", "dp, with the longest tenth apart, all in groups of equal time (TailSieve).", "tail-isolated", None),
    (
        "laminar",
        "dp, with what is left repacked onto few actors (Laminar, whose training is not).",
        "shuffled-even",
        "repack",
    ),
    (
        "seer",
        "dp, one response of each prompt first, then the longest prompts, on any actor with room (Seer).",
        "probes-first",
        "seer",
    ),
    ("lpt", "dp, each prompt, longest first, going to the actor with the fewest tokens.", "longest-first", None),
)
"""(name, summary, assignment, mid-step rule) of what `rlhfless.scheduler.peers` describes."""

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        each.name: each
        for each in (
            _static(
                "verl", "Static actors, shuffled prompts, all GPUs reserved and shared by all.", hosting="colocated"
            ),
            _static(
                "verl-lif",
                "verl, each response going to the actor with the fewest.",
                assignment="least-in-flight",
                hosting="colocated",
            ),
            _static(
                "verl-split",
                "verl with GPUs of their own for the learner and for the actors, all reserved.",
                hosting="split",
            ),
            _static("raw", "verl's pieces as serverless functions, every feature off (RLHFless Fig. 11a)."),
            _static(
                "rlhfuse",
                "raw, all actors stopped and the rest gathered when few responses remain; freed actors are released.",
                migration="global-cut",
            ),
            _static("dp", "raw, with shared prefixes computed once (RLHFless §4.2).", dedup=True),
            _PLACED,
            replace(
                _PLACED,
                name="rlhfless",
                summary="dp+pa, with the number of actors chosen each step by time and cost (RLHFless §4.4).",
                scale=True,
            ),
            replace(
                _PLACED,
                name="elastic",
                summary="Starts wide with an even mix of lengths, releases actors as responses finish; begins with "
                "the best of several sizes, and may keep a larger actor in reserve for the last responses.",
                assignment="dealt",
                scale=True,
                migration="elastic",
            ),
            replace(
                _PLACED,
                name=FRONTIER,
                summary="Groups of any size on actors of any size, chosen together on the time-cost frontier.",
                assignment="frontier",
                migration="elastic",
                scale=True,
            ),
            *(
                replace(_PLACED, name=name, summary=summary, assignment=assignment, migration=migration)
                for name, summary, assignment, migration in _PEERS
            ),
        )
    }
)
"""Every policy by name."""


def policy(name: str) -> Policy:
    """The policy `name`; `oracle:NAME` is NAME with an estimator that knows the true lengths.

    Raises InputError for an unknown name.
    """
    base = name.removeprefix(ORACLE)
    if base not in POLICIES:
        raise InputError(f"unknown policy {name!r}: known are {', '.join(POLICIES)}, each also as {ORACLE}NAME")
    found = POLICIES[base]
    return found if base == name else replace(found, name=name, oracle=True)
