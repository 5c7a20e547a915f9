"""Rules about batches: a loader that waits, that reads row by row, or that computes."""

from __future__ import annotations

import math
from dataclasses import replace

from torchrec_ext.diagnose.facts import Facts, Gain, LoaderFacts, paired_gain
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

IDLE = 0.3  # cores that others may keep busy where the wall clock says what a second process gains


def loader_sleeps(facts: Facts) -> Finding | None:
    """The loader waits for files, a network or a sleep."""
    if not facts.has("data", "sleep") or facts.median("sleep") < 0.5 * facts.median("data"):
        return None
    loader = facts.loader
    data = facts.median("data")
    sleep = facts.median("sleep")
    evidence = [
        f"{in_ms(sleep)} of the {in_ms(data)} that a batch takes, this thread slept or waited, and did not compute"
    ]
    if loader.workers:
        evidence.append(f"{loader.workers} worker(s) make the batches, and are slower than the step")
    elif loader.bytes_read:
        evidence.append(f"{loader.bytes_read:,.0f} bytes were read from files for a batch")
    count = 1
    if loader.kind == "DataLoader":
        count = loader.workers + max(1, math.ceil(data / max(facts.median("step"), 1e-4)))
    remedies = [
        Remedy(
            name="batches ready in time",
            lines=(
                "read the source once, before the first step, or a block ahead of the steps",
                *_stream_lines(loader),
            ),
            gain=gain_of_ready(facts, READY),
            changes=Change.EXACT,
            basis="measured: the step without its loader",
            is_measured=True,
        )
    ]
    workers = _worker_remedy(facts, min(count, 16))
    if workers.gain is not None and count > 1 and not loader.workers:
        workers = replace(
            workers,
            gain=Gain(workers.gain.low, max(workers.gain.high, remedies[0].gain.high if remedies[0].gain else 0.0)),
            basis="between one real worker, which was tried, and batches that are always ready",
            is_measured=False,
        )
    remedies.append(workers)
    if facts.recipe:
        evidence = ["a thread builds batches ahead (loader.prefetch), and is slower than the step"]
        remedies = [_ahead(facts)]
    return finding_of(
        facts, "loader_sleeps", "the loader waits, and the step waits for the loader", evidence, remedies,
        lambda each: each["data"],
    )  # fmt: skip


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
    share = rows / (rows + loader.collate_s)  # of the same moment; the batch's time is of others
    evidence = [
        f"{loader.dataset}.__getitem__ is called {loader.row_calls} times a batch, {loader.row_s * 1e6:.0f} us each, "
        f"which is {share:.0%} of making a batch; the rest is collating. A batch takes {in_ms(data)}",
        "it computes and does not wait" + (": no bytes were read from files" if loader.bytes_read == 0 else ""),
        *_data_lines(facts),
    ]
    ready = Remedy(
        name="__getitems__: all rows of a batch in one call, with whole-array indexing",
        lines=("def __getitems__(self, rows): ...  # in the Dataset; torch calls it with the batch's row numbers",),
        gain=gain_of_ready(facts, FROM_COLUMNS),
        changes=Change.DRAWS,
        basis="predicted from the step without its loader",
    )
    remedies = [rows_remedy(facts), ready, _worker_remedy(facts, 1)]
    title = "the Dataset is read row by row in Python" + (", from memory" if loader.bytes_read == 0 else "")
    return finding_of(facts, "row_python", title, evidence, remedies, lambda each: each["data"])


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
    collates = loader.collate_s > max(rows, 0.25 * data)  # both of one moment; the batch's time is of others
    if collates:
        evidence.append(f"{in_ms(loader.collate_s)} of it is collate_fn; reading {loader.row_calls} rows {in_ms(rows)}")
    evidence += _data_lines(facts)
    ready = Remedy(
        name="batches ready in time",
        lines=(
            "do once, before training, what collate_fn does with each batch, such as tokenising"
            if collates
            else "make the epoch's batches ahead of the steps, by whole-array operations",
            *_stream_lines(loader),
        ),
        gain=gain_of_ready(facts, READY),
        changes=Change.EXACT,
        basis="measured: the step without its loader",
        is_measured=True,
    )
    if facts.recipe:
        return finding_of(
            facts, "loader_computes", "the step waits for its batches", evidence, [_ahead(facts)],
            lambda each: each["data"],
        )  # fmt: skip
    title = "the loader computes in the training thread, and the step waits for it"
    if collates:
        title = "collate_fn computes in the training thread, and the step waits for it"
    return finding_of(
        facts, "loader_computes", title, evidence, [ready, _worker_remedy(facts, 1)], lambda each: each["data"]
    )


def _stream_lines(loader: LoaderFacts) -> tuple[str, ...]:
    """Returns the line that replaces an IterableDataset over files."""
    if not loader.is_stream:
        return ()
    return ("ChunkLoader(ParquetSource(folder), schema, config=...)  # if its rows are parquet: docs/data.md",)


def _data_lines(facts: Facts) -> list[str]:
    """Returns a sentence for each line with much of the loader's time."""
    lines = [line for line in facts.lines if line.phase == "data"]
    sampled = sum(line.seconds for line in lines)
    # Lines were sampled in another moment than the rounds, in which the loader may have taken a larger share.
    scale = min(1.0, share_of(facts, lambda each: each["data"]) * facts.sampled_s / max(sampled, 1e-12))
    shares = [(scale * line.seconds / facts.sampled_s, line) for line in lines]
    return [f"{share:.0%} of an iteration is at {line.name}: {line.text}" for share, line in shares[:3] if share >= 0.1]


def _ahead(facts: Facts) -> Remedy:
    """Returns more batches ahead as a remedy for a recipe; its thread needs a core of its own."""
    return Remedy(
        name="more batches and blocks of files ahead, or fewer negatives to draw",
        lines=("--set loader.prefetch=8 --set loader.read_ahead=2",),
        gain=expected(
            facts, lambda each: each["data"] + each["step"], lambda each: max(each["step"], 0.5 * each["data"])
        ),
        changes=Change.EXACT,
        basis="bounds: nothing, or no wait where the thread that builds batches has a core of its own",
    )


def _worker_remedy(facts: Facts, workers: int) -> Remedy:
    gain, basis = worker_gain(facts)
    if facts.loader.kind != "DataLoader":
        return Remedy(
            name="a worker process that makes the batches",
            lines=(
                "class Batches(torch.utils.data.IterableDataset):",
                "    def __iter__(self): ...  # your generator; a second worker would repeat it",
                "DataLoader(Batches(), batch_size=None, num_workers=1)",
            ),
            gain=gain,
            changes=Change.DRAWS_OF_WORKERS,
            basis=basis,
        )
    return Remedy(
        name=f"DataLoader with {workers} worker{'s' if workers > 1 else ''}",
        lines=(f"DataLoader(..., num_workers={workers}, persistent_workers=True)",),
        gain=gain,
        changes=Change.DRAWS_OF_WORKERS,
        basis=basis,
        is_measured=bool(facts.worker),
        action=Action.WORKERS,
        count=workers,
    )


def worker_gain(facts: Facts) -> tuple[Gain | None, str]:
    """Returns the speed-up by one worker process, and how it is known."""
    if facts.worker:
        gain = paired_gain([before / after for before, after in facts.worker])
        # The wall clock sees the neighbours too, and no worker hides more than the loader's whole time.
        bound = expected(facts, lambda each: max(alone_seconds(each), each["data"]))
        most = bound.high if bound is not None else gain.high
        low = gain.low
        basis = "measured with one real worker, by the wall clock"
        if facts.busy is not None and facts.busy > IDLE:
            low = low / 2
            basis += (
                f"; others keep {facts.busy:.1f} cores busy, where a second process also gets a second share of them"
            )
        return Gain(min(low, most), min(gain.high, most)), basis
    if not facts.has("data", "step"):
        return None, facts.not_measured.get("worker", "not measured")
    if facts.loader.workers:
        return None, f"{facts.loader.workers} are there already"
    # At best the loader's time disappears behind the step; at worst it only moves, and what it sends is copied twice.
    gain = facts.gain(
        lambda each: 1.2 * each["data"] + each["step"], lambda each: max(alone_seconds(each), each["data"])
    )
    return gain, f"bounds, since no worker was tried: {facts.not_measured.get('worker', 'not measured')}"
