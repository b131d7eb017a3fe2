"""The picture of a training run: reward, held-out reward and length over steps."""

from collections.abc import Sequence
from pathlib import Path

from experiments.plots import BLUE, GREEN, ORANGE, RED, picture
from experiments.train_log import Row


def train_figure(rows: Sequence[Row], final: Row, path: Path, title: str) -> None:
    """Two panels over steps: rewards, the held-out one with its standard error, and below response lengths.

    A held-out reward is that of the weights that the step draws from; `final` is of those after the last step.
    """

    def numbers(name: str) -> list[float]:
        return [float(str(row[name])) for row in rows]

    steps = numbers("step")
    held = [*(row for row in rows if row["held_out_reward"] is not None), final | {"step": rows[-1]["step"]}]
    at = [float(str(row["step"])) for row in held]
    at[-1] += 1
    means, errors = ([float(str(row[f"held_out_{each}"])) for row in held] for each in ("reward", "stderr"))
    with picture(path, 6.4, 4.6) as figure:
        reward, length = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
        reward.plot(steps, numbers("reward"), color=BLUE, linewidth=1, label="reward of the step's responses")
        reward.errorbar(
            at, means, yerr=errors, color=RED, marker="s", markersize=4.5, linewidth=1.3, capsize=2.5,
            label="held-out reward, ± standard error",
        )  # fmt: skip
        reward.set_ylabel("mean reward")
        reward.set_ylim(0, 1.02 if max(numbers("reward")) <= 1 else None)
        reward.legend(fontsize=8, loc="lower right")
        reward.set_title(title, loc="left", fontsize=10)
        length.plot(steps, numbers("mean_tokens"), color=GREEN, linewidth=1.3, label="mean")
        length.plot(steps, numbers("max_tokens"), color=ORANGE, linewidth=1, linestyle="--", label="longest")
        length.set_ylabel("response length (tokens)")
        length.set_ylim(bottom=0)
        length.set_xlabel("step")
        length.legend(fontsize=8, loc="lower right")
        for axes in (reward, length):
            axes.grid(color="#DDDDDD", linewidth=0.6)
            axes.set_axisbelow(True)
