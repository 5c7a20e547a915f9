"""Rules about batches: a loader that waits, that reads row by row, or that computes."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter

from torchrec_ext.diagnose.facts import Facts, Gain, paired_gain
from torchrec_ext.diagnose.findings import (
    Action,
    Change,
    Finding,
    Remedy,
    expected,
    finding_of,
    in_ms,
    share_of,
)
from torchrec_ext.diagnose.rules.costs import (
    FROM_COLUMNS,
    READY,
    alone_seconds,
    gain_of_ready,
    rows_remedy,
)

_DATA = itemgetter("data")  # seconds of a batch
IDLE = 0.3  # cores that others may keep busy where the wall clock says what a second process gains


def loader_sleeps(facts: Facts) -> Finding | None:
    """The loader waits for files, a network or a sleep."""
    if not facts.has("data", "sleep") or facts.median("sleep") < 0.5 * facts.median(
        "data"
    ):
        return None
    loader = facts.loader
    data = facts.median("data")
    sleep = facts.median("sleep")
    evidence = [
        f"{in_ms(sleep)} of the {in_ms(data)} that a batch takes, this thread slept or waited, and did not compute"
    ]
    if loader.workers:
        evidence.append(
            f"{loader.workers} worker(s) make the batches, and are slower than the step"
        )
    elif loader.bytes_read:
        evidence.append(
            f"{loader.bytes_read:,.0f} bytes were read from files for a batch"
        )
    count = 1
    if loader.kind == "DataLoader":
        count = loader.workers + max(
            1, math.ceil(data / max(facts.median("step"), 1e-4))
        )
    ready = _ready_in_time(
        facts,
        "read the source once, before the first step, or a block ahead of the steps",
    )
    workers = _worker_remedy(facts, min(count, 16))
    if workers.gain is not None and count > 1 and not loader.workers:
        # One worker was tried, and more are proposed: at best these have every batch
        # ready.
        high = workers.gain.high
        if ready.gain is not None:
            high = max(high, ready.gain.high)
        workers = replace(
            workers,
            gain=Gain(workers.gain.low, high),
            basis="between one real worker, which was tried, and batches that are always ready",
            is_measured=False,
        )
    remedies = [ready, workers]
    if facts.recipe:
        evidence = [
            "a thread builds batches ahead (loader.prefetch), and is slower than the step"
        ]
        remedies = [_ahead(facts)]
    title = "the loader waits, and the step waits for the loader"
    return finding_of(facts, "loader_sleeps", title, evidence, remedies, _DATA)


def _ready_in_time(facts: Facts, line: str) -> Remedy:
    """Returns batches that are ready as a remedy, with its line."""
    lines = [line]
    if facts.loader.is_stream:
        lines.append(
            "ChunkLoader(ParquetSource(folder), schema, config=...)  # if its rows are parquet: docs/data.md"
        )
    return Remedy(
        name="batches ready in time",
        lines=tuple(lines),
        gain=gain_of_ready(facts, READY),
        changes=Change.EXACT,
        basis="measured: the step without its loader",
        is_measured=True,
    )


def row_python(facts: Facts) -> Finding | None:
    """A Dataset is read row by row in Python."""
    loader = facts.loader
    if not facts.has("data", "sleep") or not loader.row_calls or loader.workers:
        return None
    data = facts.median("data")
    rows = loader.row_calls * loader.row_s
    if facts.median("sleep") >= 0.5 * data or rows + loader.collate_s < 0.5 * data:
        return None
    if loader.collate_s > rows:
        return None
    # Rows and collating were timed in one moment, and the batch in others, in which the
    # machine may have been slower.
    share = rows / (rows + loader.collate_s)
    title = "the Dataset is read row by row in Python"
    waits = "it computes and does not wait"
    if loader.bytes_read == 0:
        title += ", from memory"
        waits += ": no bytes were read from files"
    evidence = [
        f"{loader.dataset}.__getitem__ is called {loader.row_calls} times a batch, {loader.row_s * 1e6:.0f} us each, "
        f"which is {share:.0%} of making a batch; the rest is collating. A batch takes {in_ms(data)}",
        waits,
        *_data_lines(facts),
    ]
    ready = Remedy(
        name="__getitems__: all rows of a batch in one call, with whole-array indexing",
        lines=(
            "def __getitems__(self, rows): ...  # in the Dataset; torch calls it with the batch's row numbers",
        ),
        gain=gain_of_ready(facts, FROM_COLUMNS),
        changes=Change.DRAWS,
        basis="predicted from the step without its loader",
    )
    remedies = [rows_remedy(facts), ready, _worker_remedy(facts, 1)]
    return finding_of(facts, "row_python", title, evidence, remedies, _DATA)


def loader_computes(facts: Facts) -> Finding | None:
    """The loader computes, but not row by row."""
    if not facts.has("data", "sleep") or row_python(facts) or loader_sleeps(facts):
        return None
    loader = facts.loader
    data = facts.median("data")
    evidence = [
        f"a batch takes {in_ms(data)}, a step {in_ms(facts.median('step'))}; the loader computes and does not wait"
    ]
    rows = loader.row_calls * loader.row_s
    title = "the loader computes in the training thread, and the step waits for it"
    line = "make the epoch's batches ahead of the steps, by whole-array operations"
    # Compared with its rows, which were timed in the same moment.
    if loader.collate_s > max(rows, 0.25 * data):
        title = "collate_fn computes in the training thread, and the step waits for it"
        line = "do once, before training, what collate_fn does with each batch, such as tokenising"
        evidence.append(
            f"{in_ms(loader.collate_s)} of it is collate_fn; reading {loader.row_calls} rows {in_ms(rows)}"
        )
    evidence += _data_lines(facts)
    remedies = [_ready_in_time(facts, line), _worker_remedy(facts, 1)]
    if facts.recipe:
        title = "the step waits for its batches"
        remedies = [_ahead(facts)]
    return finding_of(facts, "loader_computes", title, evidence, remedies, _DATA)


def _data_lines(facts: Facts) -> list[str]:
    """Returns a sentence for each line with much of the loader's time."""
    lines = [line for line in facts.lines if line.phase == "data"]
    sampled = sum(line.seconds for line in lines)
    # Lines were sampled in another moment than the rounds, in which the loader may have
    # taken a larger share.
    scale = min(1.0, share_of(facts, _DATA) * facts.sampled_s / max(sampled, 1e-12))
    sentences = []
    for line in lines[:3]:
        share = scale * line.seconds / facts.sampled_s
        if share >= 0.1:
            sentences.append(
                f"{share:.0%} of an iteration is at {line.name}: {line.text}"
            )
    return sentences


def _ahead(facts: Facts) -> Remedy:
    """Returns more batches ahead as a remedy for a recipe; its thread needs a core of its own."""
    return Remedy(
        name="more batches and blocks of files ahead, or fewer negatives to draw",
        lines=("--set loader.prefetch=8 --set loader.read_ahead=2",),
        gain=expected(
            facts,
            lambda each: each["data"] + each["step"],
            lambda each: max(each["step"], 0.5 * each["data"]),
        ),
        changes=Change.EXACT,
        basis="bounds: nothing, or no wait where the thread that builds batches has a core of its own",
    )


def _worker_remedy(facts: Facts, workers: int) -> Remedy:
    gain, basis = worker_gain(facts)
    remedy = Remedy(
        name=f"DataLoader with {workers} workers",
        lines=(f"DataLoader(..., num_workers={workers}, persistent_workers=True)",),
        gain=gain,
        changes=Change.DRAWS_OF_WORKERS,
        basis=basis,
        is_measured=bool(facts.worker),
        action=Action.WORKERS,
        count=workers,
    )
    if facts.loader.kind != "DataLoader":
        # A generator has no rows to deal out, so it gets a loader around it, which
        # nobody but its author can write.
        lines = (
            "class Batches(torch.utils.data.IterableDataset):",
            "    def __iter__(self): ...  # your generator; a second worker would repeat it",
            "DataLoader(Batches(), batch_size=None, num_workers=1)",
        )
        name = "a worker process that makes the batches"
        return replace(
            remedy, name=name, lines=lines, is_measured=False, action=None, count=0
        )
    if workers == 1:
        return replace(remedy, name="DataLoader with 1 worker")
    return remedy


def worker_gain(facts: Facts) -> tuple[Gain | None, str]:
    """Returns the speed-up by one worker process, and how it is known."""
    if facts.worker:
        gain = paired_gain([before / after for before, after in facts.worker])
        low, high = gain
        # The wall clock sees the neighbours too, and no worker hides more than the
        # loader's whole time.
        bound = expected(facts, lambda each: max(alone_seconds(each), each["data"]))
        if bound is not None:
            high = min(high, bound.high)
        basis = "measured with one real worker, by the wall clock"
        if facts.busy is not None and facts.busy > IDLE:
            low = low / 2
            basis += (
                f"; others keep {facts.busy:.1f} cores busy, where a second process "
                "also gets a second share of them"
            )
        return Gain(min(low, high), high), basis
    if not facts.has("data", "step"):
        return None, facts.not_measured.get("worker", "not measured")
    if facts.loader.workers:
        return None, f"{facts.loader.workers} are there already"
    # At best the loader's time disappears behind the step; at worst it only moves, and
    # what it sends is copied twice.
    gain = facts.gain(
        lambda each: 1.2 * each["data"] + each["step"],
        lambda each: max(alone_seconds(each), each["data"]),
    )
    return (
        gain,
        f"bounds, since no worker was tried: {facts.not_measured.get('worker', 'not measured')}",
    )
