"""TraceML (`traceml-ai` on PyPI) on the planted programs of diagnose.py: the baseline of its row `planted-traceml`.

    traceml run benchmarks/diagnose_traceml.py --args NAME SEED STEPS

TraceML times the phases of a training's steps and, at its end, writes one verdict: a category.
It has an environment of its own in the cache folder, which sees the packages of this one. A program trains under
it as its quickstart says, `traceml.init(mode="auto")` and `trace_step` around each step; batches that no DataLoader
makes are wrapped as well, without which it names nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import output
from torch.utils.data import DataLoader

from torchrec_ext.data.catalog import cache_folder

PACKAGE = "traceml-ai==0.5.0"
LIMIT_S = 300.0  # of one program, or of pip
STEPS, QUICK_STEPS = 200, 40  # TraceML asks for 20

# By planted cause, the verdicts that count as its name: those under whose meaning,
# "common causes" or "what to do next" TraceML's own guide
# (docs/user_guide/reading-output.md in its repository) has that cause.
NAMED: dict[str, tuple[str, ...]] = {
    "loader_waits": ("INPUT_BOUND",),
    "loader_rows": ("INPUT_BOUND",),  # "slow preprocessing"
    "products": ("COMPUTE_BOUND",),  # "large model compute cost"
    # "expensive optimizer step": where the time goes, if not why
    "untouched_rows": ("COMPUTE_BOUND optimizer",),
    "host_syncs": ("RESIDUAL_HEAVY",),  # "CPU stalls"
    # "validation or evaluation inside the measured loop"
    "between_steps": ("RESIDUAL_HEAVY",),
    # No category has these: small ops and threads are not "large model compute cost".
    "launches": (),
    "threads": (),
}


def names(cause: str, verdict: str) -> bool:
    """Returns whether a verdict of TraceML is the name of a planted cause."""
    return verdict.startswith(NAMED[cause])


def installed() -> Path | None:
    """Returns TraceML's command; None where it cannot be installed, and stderr says why."""
    packages = sysconfig.get_path("purelib")
    folder = (
        cache_folder()
        / f"{PACKAGE}-{hashlib.sha256(packages.encode()).hexdigest()[:8]}"
    )
    command = folder / "bin" / "traceml"
    if command.exists():
        return command
    try:
        output([sys.executable, "-m", "venv", "--clear", folder], limit_s=LIMIT_S)
        (site,) = (folder / "lib").glob("python*/site-packages")
        # Not the bare path: an editable package is a .pth file of that folder, read
        # only of a folder that is added so.
        (site / "beside.pth").write_text(
            f"import site; site.addsitedir({packages!r})\n"
        )
        pip = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--retries",
            1,
            "--timeout",
            15,
            PACKAGE,
        ]
        output(pip, limit_s=LIMIT_S)
    except RuntimeError as error:
        print(
            f"planted-traceml: left out: {str(error).splitlines()[-1]}",
            file=sys.stderr,
            flush=True,
        )
        return None
    return command


def verdict(command: Path, name: str, seed: int, quick: bool) -> str:
    """Returns TraceML's verdict on a program, with its phase where it has one."""
    with tempfile.TemporaryDirectory() as folder:
        words = [command, "run", __file__, "--logs-dir", folder, "--run-name", "run"]
        words += ["--nproc-per-node", 1]
        for option, port in zip(
            ("--master-port", "--aggregator-port"), _free_ports(2), strict=True
        ):
            words += [option, port]
        words += ["--args", name, seed, QUICK_STEPS if quick else STEPS]
        output(words, limit_s=LIMIT_S)
        summary = json.loads(Path(folder, "run", "final_summary.json").read_text())
    # The run's primary diagnosis is this section's, and leaves its phase out.
    found = summary["step_time"]["diagnosis"]
    return " ".join(filter(None, (found["kind"], found.get("phase"))))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def without_end(batches: Any, traceml: Any) -> Iterator[Any]:
    """Yields batches epoch after epoch, whose making TraceML times: of a DataLoader by itself."""
    timed = (
        batches
        if isinstance(batches, DataLoader)
        else traceml.wrap_dataloader_fetch(batches)
    )
    while True:
        yield from timed


def train(name: str, seed: int, steps: int) -> None:
    """Trains a program as diagnose.py makes it; runs in TraceML's environment."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    train_steps(name, steps)


def train_steps(name: str, steps: int) -> None:
    """Trains a program for some steps, which TraceML times."""
    import diagnose
    import traceml_ai as traceml

    traceml.init(mode="auto")
    program = diagnose.PLANTED[name][0]()
    step, batches, model = diagnose.usual(program), program.batches, program.model
    between: dict[str, Any] = program.more.get("between", {})
    for number, batch in enumerate(
        itertools.islice(without_end(batches, traceml), steps), 1
    ):
        with traceml.trace_step(model):
            step(*batch)
        for (
            call,
            every,
        ) in between.values():
            # outside, as the quickstart has it; inside, the model's call is "forward"
            if number % every == 0:
                call()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
