"""findings(): the causes of lost time by the facts, ranked by their cost; too_noisy(): why there is no verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from torchrec_ext.diagnose.costs import (
    changed_seconds,
    changed_text,
    finding_of,
    held_lines,
    launched_seconds,
    ratios_of,
    seconds_without_ops,
    swept_seconds,
    synced_seconds,
    variant_gain,
)
from torchrec_ext.diagnose.findings import (
    LEAST,
    MEDIUM,
    UNDER,
    Change,
    Facts,
    Finding,
    Remedy,
    gain_of,
    in_ms,
)
from torchrec_ext.diagnose.trials import ADOPT

NOISY = 0.6  # spread of iterations above which there is no verdict
_IDLE = 0.3  # cores that others may keep busy where threads of this process have theirs
# Share of an iteration that lines of the user's take together; what samples say of less
# is not sure.
_LEAST_LINES = 0.1


def loader_waits(facts: Facts) -> Finding | None:
    """The loader waits for files, a network or a sleep."""
    if not _waits(facts):
        return None
    loader = facts.loader
    evidence = [
        f"{in_ms(facts.median('sleep'))} of the {in_ms(facts.median('data'))} that a batch takes, this thread slept or "
        "waited, and did not compute"
    ]
    remedies = [
        Remedy(
            name="read the source once, before the first step, or a block ahead of the steps",
            changes=Change.EXACT,
        )
    ]
    if loader.worker_s:
        evidence.append(
            f"{loader.workers} worker(s) make the batches, and wait {in_ms(loader.worker_sleep_s)} of the "
            f"{in_ms(loader.worker_s)} that one takes, on average"
        )
    elif loader.workers:
        evidence.append(
            f"{loader.workers} worker(s) make the batches, slower than the step: what they do was not measured"
        )
    else:
        name = "a DataLoader of num_workers=1, which waits in place of the step: realised(step, it) measures its gain"
        remedies.append(Remedy(name=name, changes=Change.DRAWS))
    evidence += _at_lines(facts)
    title = "the loader waits, and the step waits for the loader"
    return finding_of(
        facts, "loader_waits", title, evidence, remedies, itemgetter("data")
    )


def _sleeps(facts: Facts) -> bool:
    has = facts.has("data", "sleep")
    return has and facts.median("sleep") >= 0.5 * facts.median("data") > 0


def _waits(facts: Facts) -> bool:
    # This thread waits for its workers, whatever these do.
    loader = facts.loader
    return _sleeps(facts) and loader.worker_sleep_s >= 0.5 * loader.worker_s


def _at_lines(facts: Facts) -> list[str]:
    """Returns the lines where the loader, or a worker the step waits for, is most of the time."""
    lines = [line for line in facts.lines if line.phase == "data"]
    sampled_s = facts.sampled_s
    if facts.loader.workers and _sleeps(facts):
        lines = list(facts.loader.worker_lines)
        sampled_s = facts.loader.worker_s
    shares = [(line.seconds / sampled_s, line) for line in lines[:3]]
    return [
        f"{share:.0%} of an iteration is at {line.name}: {line.text}"
        for share, line in shares
        if share >= 0.1
    ]


def loader_rows(facts: Facts) -> Finding | None:
    """The loader computes: Python for each row, or its collate_fn."""
    if not facts.has("data", "sleep") or _waits(facts):
        return None
    loader = facts.loader
    data = facts.median("data")
    in_workers = _sleeps(facts)
    made_s = data
    # If workers are there and this thread computes, it takes batches that they made.
    row_calls = 0 if loader.workers and not in_workers else loader.row_calls
    evidence = [
        f"a batch takes {in_ms(data)}, a step {in_ms(facts.median('step'))}; the loader computes and does not wait"
    ]
    if in_workers:
        made_s = loader.worker_s
        evidence = [
            f"a step takes {in_ms(facts.median('step'))}, and waits {in_ms(data)} for {loader.workers} worker(s): one "
            f"takes {in_ms(made_s)} for a batch, on average, and computes {in_ms(made_s - loader.worker_sleep_s)} of it"
        ]
    rows = row_calls * loader.row_s
    title = "the loader computes, and the step waits for it"
    advice = "make the epoch's batches ahead of the steps, by whole-array operations"
    # Rows and collating are compared with each other: both were timed in one moment.
    if row_calls and loader.collate_s > max(rows, 0.25 * made_s):
        title = "collate_fn computes, and the step waits for it"
        advice = "do once, before training, what collate_fn does with each batch"
        evidence.append(
            f"collate_fn takes {in_ms(loader.collate_s)}, reading {row_calls} rows {in_ms(rows)}"
        )
    elif row_calls and rows + loader.collate_s >= 0.5 * made_s:
        title = "the Dataset is read row by row in Python"
        evidence.append(
            f"{loader.dataset}.__getitem__ is called {row_calls} times a batch, {loader.row_s * 1e6:.0f} us each"
        )
        advice = (
            f"give {loader.dataset} a __getitems__(rows), which torch calls with all row numbers of a batch, and index "
            "whole arrays there; adopt's Rows, of columns, makes batches inside of a captured step; ChunkLoader reads "
            "them from parquet"
        )
    evidence += _at_lines(facts)
    remedies = [Remedy(name=advice, changes=Change.DRAWS)]
    return finding_of(
        facts, "loader_rows", title, evidence, remedies, itemgetter("data")
    )


def untouched_rows(facts: Facts) -> Finding | None:
    """A dense optimizer moves rows of tables outside of the batch."""
    if not facts.has("step", "still_tables") or not facts.tables:
        return None
    table = max(facts.tables, key=lambda each: each.rows * each.dim)
    mover = " and ".join(facts.optimizers) or "the optimizer"
    rows = sum(each.rows for each in facts.tables)
    ids = sum(each.read for each in facts.tables)
    evidence = [
        f"{mover} moves every row in every step: the tables have {rows:,} rows, of which a step reads at most {ids:,} "
        f"(largest: {table.name}, {table.rows:,} x {table.dim})",
        f"if it leaves these tables alone, the step takes {changed_text(facts, 'still_tables')} instead of "
        f"{in_ms(facts.median('step'))}",
    ]
    adopted = "adopt: the step captured, and rows moved when next read; with a weight_decay take AdamW"
    sparse = Remedy(
        name="the tables with sparse=True, moved by SparseAdam, SGD or Adagrad; tables of TorchRec by hybrid_parallel",
        changes=Change.OTHER,
    )
    title = "the optimizer sweeps rows that the step never read"
    return finding_of(
        facts,
        "untouched_rows",
        title,
        evidence,
        [*_adopted(facts, adopted), sparse],
        swept_seconds,
    )


def _adopted(facts: Facts, name: str) -> list[Remedy]:
    """Returns adopt as a remedy; none if it refuses the step, or was measured not to help."""
    measured = facts.captured and gain_of(ratios_of(facts.captured)).helps == "no"
    if measured or "captured" in facts.not_measured:
        return []
    return [Remedy(name=name, changes=Change.ROUNDING, lines=ADOPT)]


def launches(facts: Facts) -> Finding | None:
    """The step consists of many tiny ops, and their price is Python and dispatch, not work."""
    if not facts.has("step", "op") or not facts.ops:
        return None
    price = facts.median("op")
    evidence = [
        f"a step runs {facts.ops:,} ops, {price * 1e6:.1f} us each on this machine before any work: "
        f"{in_ms(facts.ops * price)} of {in_ms(facts.median('step'))}; matrix products take {in_ms(facts.product_s)}"
    ]
    if facts.op_lines:
        evidence.append(f"most ops: {_first_lines(facts.op_lines)}")
    adopted = "adopt: the step captured, by turns beside yours with capture=True"
    larger = Remedy(
        name="larger batches, which take as many ops; on several ranks LocalSGD, or fewer ranks (docs/parallel.md)",
        changes=Change.OTHER,
    )
    remedies = [
        *(_adopted(facts, adopted) or [larger]),
        Remedy(
            name="one op on stacked tensors in place of a loop over them",
            changes=Change.ROUNDING,
        ),
    ]
    title = (
        "the step is many small ops: Python and dispatch take the time, not the work"
    )
    return finding_of(
        facts, "launches", title, evidence, remedies, partial(launched_seconds, facts)
    )


def _first_lines(counts: Sequence[tuple[str, int]]) -> str:
    return "; ".join(f"{line}, {count:,}" for line, count in counts[:3])


def host_syncs(facts: Facts) -> Finding | None:
    """The step brings values to Python, one by one."""
    if not facts.has("step", "sync") or not facts.syncs:
        return None
    evidence = [
        f"a step brings {facts.syncs:,} values to Python (.item(), .tolist(), if on a tensor, boolean masks): "
        f"{_first_lines(facts.sync_lines)}",
        f"with the ops that feed them: {facts.sync_ops:,} of {facts.ops:,} ops",
    ]
    remedy = Remedy(
        name="keep values as tensors (total += loss.detach()), and read one of them every hundred steps",
        changes=Change.EXACT,
    )
    title = "the step waits for values that Python wants to see"
    return finding_of(
        facts, "host_syncs", title, evidence, [remedy], partial(synced_seconds, facts)
    )


def threads(facts: Facts) -> Finding | None:
    """Another number of threads is faster."""
    for variant, count in (("one_thread", 1), ("all_threads", facts.cores)):
        if not facts.has("step", variant) or variant_gain(facts, variant).low < UNDER:
            continue
        # Threads that wait for a core of somebody else's are no fault of the program.
        if facts.threads <= facts.cores and (facts.busy or 0.0) > _IDLE:
            continue
        title = "more threads than the step can use"
        if count > facts.threads:
            title = "cores stay idle"
        evidence = (
            f"a step takes {in_ms(facts.median('step'))} on {facts.threads} thread(s) and "
            f"{changed_text(facts, variant)} on {count}; this process may use {facts.cores} core(s)"
        )
        remedy = Remedy(
            name=f"{count} thread(s)",
            changes=Change.ROUNDING,
            lines=(f"torch.set_num_threads({count})",),
        )
        return finding_of(
            facts,
            "threads",
            title,
            [evidence],
            [remedy],
            lambda each, variant=variant: (  # type: ignore[misc]
                each["step"] - changed_seconds(each, variant)
            ),
        )
    return None


def your_line(facts: Facts) -> Finding | None:
    """Lines of the step hold it without ops: sleeps, files, copies, JSON, lists."""
    lines = held_lines(facts)
    if sum(share for _, share in lines) < _LEAST_LINES:
        return None
    evidence = [
        f"no tensor op explains the time at {line.name}, {share:.0%}: {line.text}"
        for line, share in lines[:3]
    ]
    remedy = Remedy(
        name="take these lines out of the step, or run them every hundredth step",
        changes=Change.EXACT,
    )
    return finding_of(
        facts,
        "your_line",
        f"{lines[0][0].name} holds the step, and not with tensor ops",
        evidence,
        [remedy],
        lambda each: sum(seconds_without_ops(facts, each, line) for line, _ in lines),
    )


CAUSES: tuple[Callable[[Facts], Finding | None], ...] = (
    loader_waits,
    loader_rows,
    untouched_rows,
    launches,
    host_syncs,
    threads,
    your_line,
)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Returns the findings of at least a twentieth of an iteration, the largest first."""
    found = []
    for rule in CAUSES:
        finding = rule(facts)
        if finding is not None and finding.cost >= LEAST:
            found.append(finding)
    return tuple(sorted(found, key=lambda each: -each.cost))


def faults(facts: Facts) -> list[Finding]:
    """Returns the findings of .15 of an iteration and more."""
    return [each for each in findings(facts) if each.size in ("large", "medium")]


def too_noisy(facts: Facts) -> str:
    """Returns why these facts carry no verdict; empty if they do.

    Where rounds are spread far, a cause stands if it takes a share in three of four of them. Threads that want more
    cores than there are make noise themselves.
    """
    found = faults(facts)
    if (
        facts.tables
        and not facts.has("still_tables")
        and not any(finding.size == "large" for finding in found)
    ):
        why = facts.not_measured.get("still_tables", "not measured")
        return f"no verdict: whether rows that are not read cost time is not known ({why}); give more time (budget_s)"
    if facts.spread <= NOISY:
        return ""
    times = sorted(map(facts.iteration, facts.rounds))
    if len(times) < 4:
        return f"too few rounds for a verdict: {len(times)} of 4; give more time (budget_s)"
    for finding in found:
        # A share is a ratio within a round, and what slows the machine slows both sides
        # of it.
        is_large = finding.size == "large" and finding.least >= MEDIUM
        if is_large or finding.cause == "threads":
            return ""
    return (
        f"too noisy for a verdict: the middle half of {len(times)} rounds is spread over {facts.spread:.0%} of the "
        f"median iteration, {in_ms(times[0])} to {in_ms(times[-1])}; measure again on a machine that does less else"
    )
