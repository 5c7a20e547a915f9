"""Progress: shows a run's mean loss and throughput since the last record, as a bar or in lines.

RunFolder: the files of a run: its configuration, its metrics as JSON lines and TensorBoard events, and a picture.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.report.figures import BLUE, RED, figure_with_panels, save_figure

_TOGETHER = 32  # steps whose losses and weights are summed at once


class Window:
    """The loss and rows since the last record, summed on the device so that no step waits for it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reset()

    def restart(self) -> None:
        """Forgets what was added since the last record."""
        self._reset()

    @property
    def sums(self) -> Tensor:
        """This rank's sums since the last record, (3,) float64, which a checkpoint keeps and restores."""
        self._take_up()
        return self._sums

    def _reset(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._runtime.device)
        self._start = time.perf_counter()

    def add(self, loss: Tensor, weights: Tensor) -> None:
        """Adds a step: its loss, (), and the weights of its rows, (B,)."""
        self._steps.append((loss.detach(), weights))
        if len(self._steps) == _TOGETHER:
            self._take_up()

    def _take_up(self) -> None:
        if not self._steps:
            return
        losses, weights = zip(*self._steps, strict=True)
        self._steps.clear()
        loss, rows = torch.stack(losses).double().sum(), (torch.cat(weights) > 0).sum()
        self._sums += torch.stack([loss, loss.new_full((), len(losses)), rows.double()])

    def record(self, epoch: int, step: int) -> dict[str, Any]:
        """Returns the mean loss over ranks and steps, and the rows of all ranks per second of this one."""
        local = self.sums
        ranks = [torch.zeros_like(local) for _ in range(self._runtime.world_size)]
        dist.all_gather(ranks, local)
        by_rank = torch.stack(ranks).cpu()
        seconds = time.perf_counter() - self._start
        losses = (by_rank[:, 0] / by_rank[:, 1]).tolist()
        self._reset()
        return {
            "kind": "train",
            "epoch": epoch,
            "step": step,
            "loss": sum(losses) / len(losses),
            "rows": int(by_rank[:, 2].sum()),
            "rows_per_s": float(by_rank[:, 2].sum()) / seconds,
        }


class Progress:
    """A bar on a terminal; elsewhere a line per record, since a log file keeps every redraw of a bar."""

    def __init__(self, total: int, visible: bool, done: int = 0) -> None:
        self._terminal = sys.stderr.isatty()
        self._visible = visible
        self._total = total
        self._bar = tqdm(total=total, initial=done, unit="step", disable=not (visible and self._terminal))
        self._steps = 0

    @property
    def first(self) -> bool:
        """Whether this process has made one step."""
        return self._steps == 1

    def advance(self) -> None:
        """Advances by one step."""
        self._steps += 1
        self._bar.update()

    def show(self, record: dict[str, Any]) -> None:
        """Shows the figures of a record."""
        figures = ", ".join(
            f"{name} {_readable(name, value)}" for name, value in record.items() if isinstance(value, float)
        )
        if record["kind"] in ("stop", "left_out"):
            tqdm.write(record["message"])
        elif self._terminal:
            self._bar.set_postfix_str(figures)
        elif self._visible and figures:
            print(f"epoch {record['epoch']}, step {record['step']} of {self._total}: {figures}", flush=True)

    def say(self, text: str) -> None:
        """Prints a line beside the bar, on rank 0 alone."""
        if self._visible:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Closes the bar."""
        self._bar.close()


def _readable(name: str, value: float) -> str:
    if name.endswith("_lr"):
        return f"{value:.3g}"
    return f"{value:,.0f}" if name.endswith("_per_s") else f"{value:.4f}"


class RunFolderError(ValueError):
    """The folder cannot be written to, or a library for its pictures is missing."""


class RunFolder:
    """A folder that one rank writes.

    Args:
        path: folder, created if missing.
        config: settings that are written to ``config.json``.
        replace: write over another run in the folder, as a restarted rank does with its own.

    Raises:
        RunFolderError: the folder cannot be made or written to, or holds another run.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, replace: bool = False) -> None:
        self.path = path
        self.records: list[Record] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._metrics = (path / "metrics.jsonl").open("w" if replace else "x")
            (path / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        except FileExistsError:
            raise RunFolderError(
                f"run folder '{path}' holds another run or is a file; choose another with --run-dir, or remove it"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"run folder '{path}' cannot be written: {error.strerror or error}; choose another with --run-dir"
            ) from None
        self._events = _tensorboard(path / "tensorboard")

    def log(self, record: Record) -> None:
        """Appends a record to ``metrics.jsonl`` and its figures to TensorBoard; the kind ``error`` is the last."""
        self.records.append(record)
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        for name, value in record.items():
            if isinstance(value, float):
                self._events.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        if record["kind"] == "error":  # the run is about to end, and whoever drives it may not come back here
            self.close()

    def write(self, name: str, text: str) -> None:
        """Writes a text file into the folder."""
        (self.path / name).write_text(text if text.endswith("\n") else text + "\n")

    def close(self, baselines: Mapping[str, float] | None = None, *, baseline_name: str = "popularity") -> Path:
        """Closes the files and draws ``training.png``.

        Args:
            baselines: figures by name on the same held-out rows, drawn as dashed lines, such as those of the popularity
                ranking.
            baseline_name: name of these figures in the legend.
        """
        self._metrics.close()
        self._events.close()
        picture = self.path / "training.png"
        draw_training(self.records, picture, baselines or {}, baseline_name)
        return picture


def draw_training(
    records: list[Record], path: Path, baselines: Mapping[str, float], baseline_name: str = "popularity"
) -> None:
    """Draws the loss over steps, and beside it one panel per evaluated figure."""
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    names = [name for name, value in (evaluations[-1] if evaluations else {}).items() if isinstance(value, float)]
    figure, axes = figure_with_panels(1 + len(names), (4.2 * (1 + len(names)), 3.4))
    axes[0].plot([record["step"] for record in train], [record["loss"] for record in train], color=BLUE)
    axes[0].set(title="training loss", xlabel="step")
    for axis, name in zip(axes[1:], names, strict=True):
        axis.plot(
            [r["step"] for r in evaluations], [r[name] for r in evaluations], marker="o", color=BLUE, label="model"
        )
        if name in baselines:
            axis.axhline(baselines[name], linestyle="--", color=RED, label=baseline_name)
            axis.legend(frameon=False)
        axis.set(title=f"{name}, validation", xlabel="step")
    save_figure(figure, path)


def _tensorboard(path: Path) -> Any:
    try:
        import matplotlib.figure  # noqa: F401  (needed at the end: better to miss it now)
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunFolderError(
            "the run folder's TensorBoard events and picture need the extra 'report': pip install "
            "'torchrec-ext[report]'"
        ) from None
    return SummaryWriter(str(path))
