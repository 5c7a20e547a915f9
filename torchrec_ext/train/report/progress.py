"""Progress: shows a run's mean loss and throughput since the last record, as a bar or in lines.

RunFolder: the files of a run: its configuration, its metrics as JSON lines and as TensorBoard events.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from torchrec_ext.batch import ENDLESS
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.sealed import write_whole
from torchrec_ext.train.config import Record

# Steps to sum in one go: fewer small operations on the device.
_STEPS_PER_SUM = 32
# Between the lines of a stage of work.
_EVERY_S = 10.0
_Item = TypeVar("_Item")


class _Sleep:
    """Measures the seconds in which the current thread was blocked, neither running nor waiting for a core.

    If Linux' schedstat cannot be read, ``is_available`` is False.
    """

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        self.is_available = False
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError:
            return
        weakref.finalize(self, os.close, self._file)
        # Checked once here: the file may exist without its three numbers.
        self.is_available = len(os.pread(self._file, 96, 0).split()) == 3

    def __call__(self) -> float:
        queued = int(os.pread(self._file, 96, 0).split()[1]) * 1e-9
        return time.perf_counter() - time.thread_time() - queued


def _no_clock() -> float:
    return 0.0


class Window:
    """Sums the loss and rows since the last record, on the device, so that no step waits for it.

    It also counts the seconds of waiting for batches. On several ranks of a CPU it counts the other blocked seconds of
    the thread too: in collectives, until the other ranks arrive and their data is there. Reading this clock takes two
    microseconds. Two other waits are counted alike: compute threads of a rank wait for each other, and a save between
    two steps waits for its files.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sleep: Callable[[], float] = _no_clock
        # One rank waits for no other, and on a GPU the kernels wait, not this thread.
        if runtime.world_size > 1 and runtime.device.type == "cpu":
            sleep = _Sleep()
            if sleep.is_available:
                self._sleep = sleep
        self.restart()

    @property
    def sums(self) -> Tensor:
        """This rank's sums since the last record, (3,) float64; a checkpoint saves and restores them."""
        self._add_steps()
        return self._sums

    def restart(self) -> None:
        """Discards the sums since the last record."""
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._runtime.device)
        self._start = time.perf_counter()
        self._data_wait_s = 0.0
        # The clock has no known start: its value now is subtracted here, and its value
        # at the record is added there.
        self._sleep_s = -self._sleep()

    def fetch(self, batches: Iterator[_Item]) -> _Item | None:
        """Returns the next batch, None after the last, and counts the seconds of waiting for it."""
        slept = self._sleep()
        start = time.perf_counter()
        batch = next(batches, None)
        self._data_wait_s += time.perf_counter() - start
        # Waits for a batch are no waits for other ranks.
        self._sleep_s -= self._sleep() - slept
        return batch

    def add(self, loss: Tensor, weights: Tensor) -> None:
        """Adds a step: its loss, (), and the weights of its rows, (B,)."""
        self._steps.append((loss.detach(), weights))
        if len(self._steps) == _STEPS_PER_SUM:
            self._add_steps()

    def _add_steps(self) -> None:
        if not self._steps:
            return
        losses, weights = zip(*self._steps, strict=True)
        self._steps.clear()
        loss = torch.stack(losses).double().sum()
        rows = (torch.cat(weights) > 0).sum()
        self._sums += torch.stack([loss, loss.new_full((), len(losses)), rows.double()])

    def take(self) -> dict[str, Any]:
        """Returns the figures since the last call: ``loss``, ``rows`` of all ranks, ``rows_per_s`` and ``data_wait``.

        ``loss`` is the mean over ranks and steps, and rows are counted per second of this rank. ``data_wait`` is the
        share of time spent waiting for batches, on the rank that waited longest. Several ranks of a CPU add
        ``ranks_wait``, the mean share of their time in collectives.
        """
        # A rank without the clock sends -1; then the waits of no rank are known.
        slept = -1.0
        if self._sleep is not _no_clock:
            slept = self._sleep_s + self._sleep()
        local = torch.cat([self.sums, self.sums.new_tensor([self._data_wait_s, slept])])
        ranks = [torch.zeros_like(local) for _ in range(self._runtime.world_size)]
        dist.all_gather(ranks, local)
        loss, steps, rows, data_wait_s, slept_s = torch.stack(ranks).cpu().unbind(1)
        seconds = time.perf_counter() - self._start
        self.restart()
        record = {
            "loss": float((loss / steps).mean()),
            "rows": int(rows.sum()),
            "rows_per_s": float(rows.sum()) / seconds,
            "data_wait": float(data_wait_s.max()) / seconds,
        }
        if self._runtime.world_size > 1 and float(slept_s.min()) > -0.5:
            # The two waits are read from two clocks, so their sum may be a little above 1: it is cut.
            data = (data_wait_s / seconds).clamp(0, 1)
            collectives = (slept_s / seconds).clamp(min=0).minimum(1 - data)
            record["ranks_wait"] = float(collectives.mean())
        return record


def time_shares(records: Sequence[Record]) -> dict[str, float]:
    """Returns the shares of the steps' time over a run, from its records of kind ``train``.

    Returns:
        ``data``: waiting for batches, on the rank that waited longest; ``ranks``: in collectives, the mean of the
        ranks, if it was measured; ``compute``: the rest.

    Example:
        >>> time_shares([{"kind": "train", "rows": 8, "rows_per_s": 4.0, "data_wait": 0.25}])
        {'data': 0.25, 'compute': 0.75}
    """
    records = [
        record for record in records_of(records, "train") if record.get("rows_per_s")
    ]
    shares = {}
    for name, figure in (("data", "data_wait"), ("ranks", "ranks_wait")):
        waited = total = 0.0
        for record in records:
            seconds = record["rows"] / record["rows_per_s"]
            if figure in record:
                waited += seconds * record[figure]
                total += seconds
        if total or name == "data":
            shares[name] = waited / (total or 1.0)
    return {**shares, "compute": max(0.0, 1 - sum(shares.values()))}


class Progress:
    """Shows a bar on a terminal alone, because a log file keeps every redraw of it, and a line per record."""

    def __init__(self, total: int, visible: bool, done: int = 0) -> None:
        self._visible = visible
        # tqdm draws no bar, but the steps and their rate, if the total is None.
        self._total = None if total == ENDLESS else total
        self._bar = tqdm(
            total=self._total,
            initial=done,
            unit="step",
            # None is tqdm's word for no bar where stderr is no terminal.
            disable=None if visible else True,
            dynamic_ncols=True,
        )

    @property
    def is_bounded(self) -> bool:
        """Whether the run has an end."""
        return self._total is not None

    def advance(self) -> None:
        """Advances by one step."""
        self._bar.update()

    def show(self, record: dict[str, Any]) -> None:
        """Shows the figures of a record, or the message of a stop."""
        figures = []
        for name, value in record.items():
            if isinstance(value, float):
                figures.append(f"{name} {_readable(name, value)}")
        of_total = "" if self._total is None else f" of {self._total}"
        place = f"epoch {record['epoch']}, step {record['step']}{of_total}"
        if record["kind"] == "stop":
            self.say(record["message"])
        elif figures:
            self.say(f"{place}: {', '.join(figures)}")

    def say(self, text: str) -> None:
        """Prints a line above the bar, on rank 0 only."""
        if self._visible:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Closes the bar."""
        self._bar.close()


# Figures of dynamic ids that count.
_COUNTS = ("ids_live", "ids_admitted", "ids_evicted", "ids_refused")


def _readable(name: str, value: float) -> str:
    if name.endswith("_lr"):
        return f"{value:.3g}"
    if name.endswith("_per_s") or name in _COUNTS:
        return f"{value:,.0f}"
    return f"{value:.4f}"


class RunFolderError(ValueError):
    """The folder cannot be written to, or TensorBoard is missing."""


class RunFolder:
    """The folder of a run, written by one rank.

    Args:
        path: folder, created if missing.
        config: settings that are written to ``config.json``.
        replace: write over another run in the folder, as a restarted rank does with its own.
        before: lines of ``metrics.jsonl`` that a run which goes on begins with.

    Raises:
        RunFolderError: the folder cannot be made or written to, or holds another run.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        *,
        replace: bool = False,
        before: Sequence[str] = (),
    ) -> None:
        self.path = path
        # Before anything is written: with the extra installed, the same folder is tried
        # again.
        event_writer = _event_writer()
        try:
            path.mkdir(parents=True, exist_ok=True)
            metrics = path / "metrics.jsonl"
            if replace:
                write_whole(metrics, "".join(f"{line}\n" for line in before).encode())
            # Mode x fails if another run is there.
            self._metrics = metrics.open("a" if replace else "x")
            (path / "config.json").write_text(
                json.dumps(config, indent=2, default=str) + "\n"
            )
        except FileExistsError:
            raise RunFolderError(
                f"run folder '{path}' holds another run or is a file; choose another with --run_dir, or remove it"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"run folder '{path}' cannot be written: {error.strerror or error}; choose another with --run_dir"
            ) from None
        self._events = event_writer(str(path / "tensorboard"))

    def log(self, record: Record) -> None:
        """Appends a record to ``metrics.jsonl`` and its figures to TensorBoard; the kind ``error`` is the last."""
        # JSON has no nan, which is the mean loss of no step.
        as_json = {
            name: None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for name, value in record.items()
        }
        self._metrics.write(json.dumps(as_json) + "\n")
        self._metrics.flush()
        for name, value in record.items():
            if isinstance(value, float):
                self._events.add_scalar(
                    f"{record['kind']}/{name}", value, record["step"]
                )
        # The run is about to end, and its caller may not close the folder.
        if record["kind"] == "error":
            self.close()

    def write(self, name: str, text: str) -> None:
        """Writes a text file into the folder."""
        if not text.endswith("\n"):
            text += "\n"
        (self.path / name).write_text(text)

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._events.close()


def records_of(records: Sequence[Record], kind: str) -> list[Record]:
    """Returns the records of a kind, such as ``eval``."""
    return [record for record in records if record["kind"] == kind]


def _event_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunFolderError(
            "the run folder's TensorBoard events need the extra 'report': pip install 'torchrec-ext[report]'"
        ) from None
    return SummaryWriter


def stage_lines(runtime: Runtime, app: str) -> Callable[[str, int, int], None]:
    """Returns a function that says how far a stage of work is, on rank 0, by a line every ten seconds.

    Args:
        runtime: this rank's runtime.
        app: name that the lines begin with.
    """
    due = time.monotonic() + _EVERY_S

    def say(stage: str, done: int, total: int) -> None:
        nonlocal due
        if runtime.is_main and time.monotonic() >= due:
            due = time.monotonic() + _EVERY_S
            print(f"{app}: {stage}, {done:,} of {total:,}", flush=True)

    return say
