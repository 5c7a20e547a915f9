"""What a run says of itself while it runs: mean loss and throughput since the last record, and a bar or a line for it."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from torchrec_ext.distributed.runtime import Runtime

_TOGETHER = 32  # steps whose losses and weights are summed at once


class Window:
    """Loss and rows since the last record, summed on the device so that no step waits for it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reset()

    def restart(self) -> None:
        """Forgets what was added since the last record."""
        self._reset()

    @property
    def sums(self) -> Tensor:
        """(3,) float64 of this rank since the last record, for a checkpoint to keep; writing it goes on from there."""
        self._take_up()
        return self._sums

    def _reset(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._runtime.device)
        self._start = time.perf_counter()

    def add(self, loss: Tensor, weights: Tensor) -> None:
        """One step: its loss, (), and the (B,) weights of its rows."""
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
        """The mean loss over ranks and steps, and rows of all ranks per second of this one."""
        own = self.sums
        ranks = [torch.zeros_like(own) for _ in range(self._runtime.world_size)]
        dist.all_gather(ranks, own)
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
        """One step further."""
        self._steps += 1
        self._bar.update()

    def show(self, record: dict[str, Any]) -> None:
        """The figures of a record."""
        figures = ", ".join(f"{name} {_readable(name, value)}" for name, value in record.items() if isinstance(value, float))
        if record["kind"] in ("stop", "left_out"):
            tqdm.write(record["message"])
        elif self._terminal:
            self._bar.set_postfix_str(figures)
        elif self._visible and figures:
            print(f"epoch {record['epoch']}, step {record['step']} of {self._total}: {figures}", flush=True)

    def say(self, text: str) -> None:
        """A line beside the bar; on rank 0 alone."""
        if self._visible:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def _readable(name: str, value: float) -> str:
    if name.endswith("_lr"):
        return f"{value:.3g}"
    return f"{value:,.0f}" if name.endswith("_per_s") else f"{value:.4f}"
