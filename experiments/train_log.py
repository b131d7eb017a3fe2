"""What a training run tells on the way: a live table, metrics.jsonl, event files where TensorBoard is installed."""

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments.output import Cell, format_cell, write_atomic
from experiments.real import RealStep
from rlhfless.accounting.billing import bill
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray

METRICS, FIGURE = "metrics.jsonl", "train.png"
"""One line a step; reward and length over steps."""
MOST_ROWS = 15
"""Rows of the live table (chosen: they fit on a small terminal)."""
HEADINGS = (
    ("step", "step"), ("reward", "reward"), ("held out", "held_out_reward"), ("KL", "kl"), ("tokens", "mean_tokens"),
    ("actors", "actors"), ("gen s", "generation_s"), ("learn s", "learning_s"), ("step s", "step_s"),
    ("USD", "usd"), ("saved %", "saving"),
)  # fmt: skip
"""Columns of the live table; what is saved is simulated, against the static plan of the same step."""

Row = dict[str, Cell]
"""A step, by name of the number."""


def step_row(step: RealStep, learned: Any, usd_per_gpu_hour: float) -> Row:
    """What is told of a step; `learned` is a `backends.training.Learned`."""
    plan, report, rewards = step.record.plan, step.record.report, step.rewards
    assert rewards is not None
    cost = bill(report, usd_per_gpu_hour)
    return {
        "step": report.step,
        "epoch": report.epoch,
        "policy": report.policy,
        "weights": str(report.step),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "mean_tokens": float(report.tokens.mean()),
        "max_tokens": int(report.tokens.max()),
        "truncated": float(step.truncated.mean()),
        "actors": len(plan.actors),
        "cuts": report.counters.cuts,
        "moves": report.counters.moves,
        "failures": report.counters.failures,
        "generation_s": report.phase_s("generation"),
        "preparation_s": report.phase_s("preparation"),
        "learning_s": report.phase_s("learning"),
        "step_s": report.step_s,
        "planning_s": step.record.planning_s,
        "executed_gpu_s": cost.executed_gpu_s,
        "held_gpu_s": cost.held_gpu_s,
        "usd": cost.usd,
        "mismatch_mean": learned.mismatch.mean_abs,
        "mismatch_max": learned.mismatch.max_abs,
        "mismatch_ratio": learned.mismatch.mean_ratio,
        **{name: float(value) for name, value in sorted(learned.metrics.items())},
    }


def held_out_error(scores: FloatArray, responses_per_prompt: int) -> tuple[float, float]:
    """Mean reward, and its standard error over prompts (0 for a single one)."""
    means = scores.reshape(-1, responses_per_prompt).mean(axis=1)
    error = float(means.std(ddof=1) / np.sqrt(means.size)) if means.size > 1 else 0.0
    return float(means.mean()), error


def read_rows(path: Path) -> list[Row]:
    """The steps that a metrics.jsonl holds; a last line that a killed process has left half is none.

    Raises InputError where it cannot be read.
    """
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


class Log:
    """Tells of steps as they end. A context manager."""

    def __init__(self, folder: Path, past: list[Row], steps: int, title: str) -> None:
        """`past`: steps of an earlier process, which the file then begins with."""
        self._path, self._steps, self._title = folder / METRICS, steps, title
        self._rows = list(past)
        write_atomic(self._path, "".join(_line(row) for row in past))
        self._console = Console(stderr=True)
        self._live: Live | None = None
        if sys.stderr.isatty():
            self._live = Live(self._table(), console=self._console, refresh_per_second=2)
        self._board = _board(folder / "board")

    def __enter__(self) -> "Log":
        if self._live is not None:
            self._live.start()
        else:
            print(f"{self._title}: {self._steps - len(self._rows)} steps to do", file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._board is not None:
            self._board.close()

    def step(self, row: Row) -> None:
        """A step has ended."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._table())
        else:
            print("  ".join(f"{name} {cell}" for name, cell in _cells(row) if cell), file=sys.stderr, flush=True)
        if self._board is not None:
            _tell(self._board, row)

    def _table(self) -> Table:
        table = Table(title=f"{self._title}, step {len(self._rows)} of {self._steps}")
        for heading, _ in HEADINGS:
            table.add_column(heading, justify="right")
        for row in self._rows[-MOST_ROWS:]:
            table.add_row(*(cell for _, cell in _cells(row)))
        return table


def _cells(row: Row) -> list[tuple[str, str]]:
    found = []
    for heading, name in HEADINGS:
        value = row.get(name)
        if name == "saving" and isinstance(value, float):
            value = round(100 * value, 1)
        found.append((heading, format_cell(value)))
    return found


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


# ---- TensorBoard


def _board(folder: Path) -> Any:
    """A writer of event files; None without the package tensorboard."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    return writer.EventFileWriter(str(folder))


def _tell(board: Any, row: Row) -> None:
    event, summary = (importlib.import_module(f"tensorboard.compat.proto.{name}_pb2") for name in ("event", "summary"))
    values = [
        summary.Summary.Value(tag=name, simple_value=float(value))
        for name, value in row.items()
        if isinstance(value, int | float)
    ]
    told = summary.Summary(value=values)
    board.add_event(event.Event(wall_time=time.time(), step=int(str(row["step"])), summary=told))
