"""From a raw log larger than memory to trained weights by the commands, and figures of anybody's vectors.

    python benchmarks/chain.py [--only ROW ...] [--turns 3] [--studies] [--quick]

The log has the form of Criteo's: 26 columns of 8 hexadecimal digits, 13 numbers, a list and a label, in parquet.

`ranks`: an epoch of `rec.train` with the recipe `stream` on 2 ranks against 1, one thread each, over 1 GB of the log as
`rec.data.preprocess` wrote it. The ranks hold all tables, which fit, and average their weights now and then
(`sync.mode=local_sgd`), so that each captures its step as the one rank does; the AUC of both stands beside.
`ranks-every-step`: the same with the settings as they come, tables sharded and rows exchanged in every step, which a
larger table needs. The ceiling is what two such processes do that never talk, each with all rows. The seconds are those
of the epoch's steps.
`stream` (a study: 20 minutes, 17 GB of disk): 10 GB of the log preprocessed, then trained for an epoch on one rank. The
rows are the greatest resident memory of the process while it trained, how much more it held in the last quarter of the
epoch than in the second, and the share of the epoch in which the step waited for data.
`evaluate`: `vector_figures` over MovieLens 1M's shape, 6,040 users and 3,706 items with vectors of 64, from files to
figures, popularity's beside them, without the start of Python. `evaluate-recbole`: the same figures of the same vectors
by RecBole's own evaluation (`Trainer.evaluate`) as it comes, which must be equal to 1e-6, and `-best-batch` at the best
of three batch sizes; left out where RecBole cannot be imported, by this Python or by $RECBOLE_PYTHON.
`evaluate-memory`: peak of a process that ranks 1,000 users over a catalogue of 1 M vectors. Last line: one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import ROOT, Options, Row, command_line, last_json, peak_mb, rates, row

from torchrec_ext.train.metrics import vector_figures

BIN = Path(sys.executable).parent
CATEGORICAL, DENSE = 26, 13
FILE_ROWS, GROUP_ROWS = 2**20, 2**16
MEMORY_MB, GROWTH_MB, WAIT = 2000, 64, 0.05
FIGURES = ("recall@10", "ndcg@10", "hr@10", "mrr@10", "map@10")
SAMPLE_S = 0.1
LOG_EVERY = 10
CAPTURED = {"train__compile": "require"}
APART = {
    "plan__sharding": "data_parallel",
    "sync__mode": "local_sgd",
    "sync__every": "128",
}
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def texts(numbers: np.ndarray[Any, Any]) -> pa.Array:
    """(N,) whole numbers, below 2**32, as texts of 8 hexadecimal digits that do not show their order."""
    mixed = (numbers.astype(np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    digits = _DIGITS[
        (mixed[:, None] >> np.arange(28, -4, -4, dtype=np.uint64)) & np.uint64(15)
    ]
    offsets = pa.py_buffer(np.arange(0, 8 * len(numbers) + 1, 8, dtype=np.int32))
    return pa.Array.from_buffers(
        pa.string(), len(numbers), [None, offsets, pa.py_buffer(digits.tobytes())]
    )


def write_file(path: Path, seed: int, rows: int) -> None:
    """Writes rows whose label depends on the first two columns and the first number."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    logits = np.full(rows, -2.0)
    for number in range(CATEGORICAL):
        size = 10 ** (2 + number % 5)
        values = np.minimum(size * rng.random(rows) ** 3, size - 1).astype(np.int64)
        columns[f"c{number}"] = texts(values + number * 10**7)
        if number < 2:
            logits += np.random.default_rng(number).normal(size=size)[values]
    for number in range(DENSE):
        columns[f"d{number}"] = rng.normal(size=rows).astype(np.float32)
    logits += 0.5 * columns["d0"]
    lengths = rng.integers(0, 21, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns["history"] = pa.ListArray.from_arrays(
        pa.array(offsets), texts(rng.integers(0, 200_000, int(offsets[-1])))
    )
    columns["label"] = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    pq.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS)


class Log(NamedTuple):
    """A raw log and the folder that rec.data.preprocess made of it; the rows are those for training."""

    raw_gb: float
    rows: int
    folder: Path
    seconds: float


def preprocessed(folder: Path, gigabytes: float, file_rows: int) -> Log:
    """Writes a raw log of so many GB, of three files at least, and preprocesses it by the command."""
    raw, out, files = folder / "raw", folder / "rows", 0
    raw.mkdir()
    while files < 3 or size_gb(raw) < gigabytes:
        write_file(raw / f"part-{files:05d}.parquet", files, file_rows)
        files += 1
    start = time.perf_counter()
    settings = {
        "config.folder": raw,
        "config.max_size": 100_000,
        "memory": "1500MB",
    }
    run(
        [
            sys.executable,
            "-m",
            "torchx_apps.preprocess",
            "--recipe",
            "clicks",
            "--out",
            out,
            *flags(settings),
        ]
    )
    return Log(size_gb(raw), (files - 1) * file_rows, out, time.perf_counter() - start)


def size_gb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet")) / 1e9


def flags(settings: dict[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in settings.items()]


def run(command: Sequence[object]) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(
            f"{command} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )


def training(rows: Path, run_dir: Path, *, ranks: int = 1, **more: str) -> list[str]:
    """What a user types to train for an epoch; ``more`` settings have ``__`` for the dot."""
    chosen = {key.replace("__", "."): value for key, value in more.items()}
    settings = flags(
        {
            "data.name": rows,
            "train.epochs": 1,
            "train.log_every": LOG_EVERY,
            "export": "never",
        }
        | chosen
    )
    if ranks == 1:
        return [
            sys.executable,
            "-m",
            "torchx_apps.train",
            "--recipe",
            "stream",
            "--run_dir",
            str(run_dir),
            *settings,
        ]
    job = [
        "rec.train.hybrid",
        "--recipe",
        "stream",
        "-j",
        f"1x{ranks}",
        "--",
        "--run_dir",
        str(run_dir),
    ]
    return [str(BIN / "torchx"), "run", "-s", "local_cwd", *job, *settings]


def epoch(run_dir: Path) -> tuple[float, float]:
    """Seconds of the steps of a run, and the share of these in which it waited for data."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    seconds = [record["rows"] / record["rows_per_s"] for record in records]
    waited = sum(
        record["data_wait"] * each
        for record, each in zip(records, seconds, strict=True)
    )
    return sum(seconds), waited / sum(seconds)


def trained(
    commands: Sequence[Sequence[str]], *, watched: Path | None = None
) -> list[tuple[int, float]]:
    """Runs commands at the same time, one thread each; of the first the records so far and its MB, sample by sample."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for command, output in zip(commands, outputs, strict=True)
        ]
        samples = []
        while any(process.poll() is None for process in processes):
            if watched is not None:
                samples.append((records(watched), resident_mb(processes[0].pid)))
            time.sleep(SAMPLE_S)
        for process, output in zip(processes, outputs, strict=True):
            output.seek(0)
            if process.returncode:
                raise RuntimeError(
                    f"{process.args} ended with exit code {process.returncode}:\n{output.read()[-3000:]}"
                )
    return samples


def records(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"kind": "train"') if file.exists() else 0


def resident_mb(pid: int) -> float:
    """Resident memory of a process, MB; 0 where it has just ended."""
    try:
        return (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 1e6
        )
    except (OSError, IndexError):
        return 0.0


def stream(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        log = preprocessed(
            Path(name), *((0.0, 2**14) if options.quick else (10.0, FILE_ROWS))
        )
        run_dir = Path(name) / "run"
        samples = trained([training(log.folder, run_dir)], watched=run_dir)
        seconds, waited = epoch(run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
    quarter = samples[-1][0] / 4
    second, last = (
        statistics.median(
            [mb for done, mb in samples if low <= done / quarter < low + 1] or [0.0]
        )
        for low in (1, 3)
    )
    of_log = {
        "raw_gb": round(log.raw_gb, 2),
        "rows": log.rows,
        "preprocess_s": round(log.seconds),
    }
    peak = max(mb for _, mb in samples)
    yield row(
        "stream-memory",
        peak,
        "MB",
        required=MEMORY_MB,
        **of_log,
        auc=round(summary["test"]["auc"], 4),
    )
    yield row("stream-memory-growth", last - second, "MB", required=GROWTH_MB)
    yield row("stream-wait", waited, "share", required=WAIT, epoch_s=round(seconds, 1))


def ranks(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        log = preprocessed(
            Path(name), *((0.0, 2**14) if options.quick else (1.0, FILE_ROWS))
        )
        jobs: dict[str, dict[str, Any]] = {
            "1 rank": CAPTURED,
            "2 ranks": {"ranks": 2, **CAPTURED, **APART},
            "every step": {"ranks": 2},
        }
        seconds: dict[str, list[float]] = {which: [] for which in (*jobs, "apart")}
        waits, aucs = [], {}
        for turn in range(1 if options.quick else options.turns):
            for which, settings in jobs.items():
                run_dir = Path(name) / f"{turn}-{which}"
                trained([training(log.folder, run_dir, **settings)])
                taken, waited = epoch(run_dir)
                seconds[which].append(taken)
                if which == "1 rank":
                    waits.append(waited)
                aucs[which] = json.loads((run_dir / "summary.json").read_text())[
                    "test"
                ]["auc"]
            folders = [Path(name) / f"{turn}-apart-{number}" for number in range(2)]
            trained([training(log.folder, folder, **CAPTURED) for folder in folders])
            seconds["apart"].append(
                statistics.mean(epoch(folder)[0] for folder in folders) / 2
            )
    speed = {which: rates(log.rows, each) for which, each in seconds.items()}
    ceiling = statistics.median(
        both / alone
        for both, alone in zip(speed["apart"], speed["1 rank"], strict=True)
    )
    for which, named, required in (
        ("2 ranks", "ranks", 1.7),
        ("every step", "ranks-every-step", None),
    ):
        yield row(
            named,
            speed[which],
            "rows/s",
            baseline=speed["1 rank"],
            better="more",
            required=required,
            ceiling=ceiling,
            rows=log.rows,
            wait=round(statistics.median(waits), 4),
            auc=round(aucs[which], 4),
            auc_of_1_rank=round(aucs["1 rank"], 4),
        )


class Evaluation(NamedTuple):
    """Files of vectors and pairs."""

    users: Path
    items: Path
    truth: Path
    seen: Path


def movielens(folder: Path, users: int, items: int) -> Evaluation:
    """Writes vectors of 64 and pairs in MovieLens 1M's shape: about 166 items of each user, a tenth of them to find."""
    rng = np.random.default_rng(0)
    files = Evaluation(*(folder / f"{name}.parquet" for name in Evaluation._fields))
    for path, count in ((files.users, users), (files.items, items)):
        vectors = rng.normal(size=(count, 64)).astype(np.float32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 64)
        pq.write_table(pa.table({"id": np.arange(count), "vector": lists}), path)
    counts = np.minimum(20 + rng.geometric(1 / 146, users), items // 2)
    owners = np.arange(users).repeat(counts)
    pairs = np.unique(
        np.stack([owners, (items * rng.random(len(owners)) ** 2).astype(np.int64)]),
        axis=1,
    )
    held_out = rng.random(pairs.shape[1]) < 0.1
    for path, chosen in ((files.truth, held_out), (files.seen, ~held_out)):
        user, item = pairs[:, chosen]
        pq.write_table(pa.table({"user": user, "item": item}), path)
    return files


def evaluated(files: Evaluation) -> dict[str, float]:
    """The figures of vectors and pairs that are read from files; ids are numbers of rows."""
    vectors = []
    for path in (files.users, files.items):
        lists = pq.read_table(path)["vector"].combine_chunks()
        vectors.append(lists.flatten().to_numpy().reshape(len(lists), -1))
    pairs = []
    for path in (files.truth, files.seen):
        table = pq.read_table(path)
        pairs.append(np.stack([table["user"].to_numpy(), table["item"].to_numpy()], 1))
    return vector_figures(*vectors, *pairs, metrics=FIGURES).figures


def evaluation(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        files = movielens(
            Path(name), *((604, 370) if options.quick else (6_040, 3_706))
        )
        figures, seconds = evaluated(files), []
        for _ in range(options.turns):
            start = time.perf_counter()
            evaluated(files)
            seconds.append(time.perf_counter() - start)
        yield row("evaluate", seconds, "s", required=0.25)
        python = os.environ.get("RECBOLE_PYTHON", sys.executable)
        if subprocess.run(
            [python, "-c", "import recbole"], capture_output=True
        ).returncode:
            print(
                "evaluate-recbole: left out: RecBole cannot be imported; set RECBOLE_PYTHON",
                file=sys.stderr,
            )
        else:
            theirs = last_json(
                [
                    python,
                    ROOT / "benchmarks" / "recbole_evaluation.py",
                    name,
                    options.turns,
                ]
            )
            worst = max(
                abs(theirs["figures"][figure] - figures[figure]) for figure in FIGURES
            )
            if worst > 1e-6:
                raise RuntimeError(
                    f"RecBole's figures are {theirs['figures']}, ours {figures}"
                )
            for name_of_row, batch, required in (
                ("", "default", 100),
                ("-best-batch", "best", None),
            ):
                yield row(
                    f"evaluate-recbole{name_of_row}",
                    seconds,
                    "s",
                    baseline=theirs[batch]["seconds"],
                    required=required,
                    recbole=theirs["recbole"],
                    eval_batch_size=theirs[batch]["eval_batch_size"],
                    greatest_difference=worst,
                )
        child = f"import chain, pathlib; chain.of_a_million(pathlib.Path({name!r}), {options.quick})"
        peak = last_json(
            [sys.executable, "-c", child], PYTHONPATH=str(ROOT / "benchmarks")
        )
        yield row("evaluate-memory", peak, "MB", required=MEMORY_MB)


def of_a_million(folder: Path, quick: bool) -> None:
    """Prints the peak memory of this process, MB, after an evaluation over a catalogue of a million."""
    folder = folder / "million"
    folder.mkdir()
    items = 10_000 if quick else 1_000_000
    child = f"import chain, pathlib; chain.movielens(pathlib.Path({str(folder)!r}), 1000, {items})"
    run([sys.executable, "-c", child])
    evaluated(Evaluation(*(folder / f"{name}.parquet" for name in Evaluation._fields)))
    print(peak_mb())


def main() -> None:
    torch.set_num_threads(1)
    rows = {"ranks": ranks, "evaluate": evaluation, "stream": stream}
    command_line(__doc__, rows, turns=3, packages="pyarrow numpy", studies=["stream"])


if __name__ == "__main__":
    main()
