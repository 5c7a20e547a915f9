"""Where a run begins, anew or at a checkpoint; and the signal that asks it to stop."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.capture.policy import TrainingDivergedError
from torchrec_ext.schema import BatchSchema, DataError
from torchrec_ext.schema.validation import listed
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    damage,
    newest_good,
    read_checkpoint,
)
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url
from torchrec_ext.train.guards import RunStoppedError
from torchx_apps.process import children_of, end_now, once
from torchx_apps.recipes.saved_job import CONFIG, records_in
from torchx_apps.tasks.task import Task

CHECKPOINTS = "checkpoints"
# Entry of a checkpoint's manifest.
MEANING = "ids"


def new_run(recipe: str) -> Path:
    """Returns the folder of a run whose user has named none."""
    return Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_recipe(folder: Path, recipe: str) -> None:
    """Refuses to go on with a run of another recipe, and so to write over its settings.

    Args:
        folder: a run folder, or the folder of a job of several networks.
        recipe: name of the job's recipe.

    Raises:
        CheckpointError: the folder's run is of another recipe.
    """
    for file in sorted([*folder.glob(CONFIG), *folder.glob(f"*/{CONFIG}")]):
        other = None
        # Deeply nested JSON raises RecursionError.
        with suppress(OSError, ValueError, RecursionError):
            config = json.loads(file.read_text())
            other = config.get("name") if isinstance(config, dict) else None
        if other not in (None, recipe):
            raise CheckpointError(
                f"--run_dir {folder}: is a run of recipe '{other}', not of '{recipe}'; give a run of '{recipe}', or "
                "begin with its weights: --start.path RUN"
            )


# Kinds of dynamic ids, in the place of a vocabulary's digest.
_RAW_KINDS = ("whole numbers", "text")


def _raw_kind(task: Task, name: str, dynamic: Collection[str]) -> str | None:
    """Returns the kind of a column's dynamic ids; None if its ids are rows of a vocabulary."""
    if not dynamic or set(dynamic).isdisjoint(task.same_ids(name)):
        return None
    whole_numbers, text = _RAW_KINDS
    return whole_numbers if pa.types.is_integer(task.raw_values(name).type) else text


def meaning_of_ids(
    task: Task, dynamic: Collection[str] = (), first: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Describes what a task's ids and numbers stand for by column, for a checkpoint's manifest.

    Args:
        task: the task.
        dynamic: columns with dynamic ids, which mean themselves: they have the kind of their ids for a digest.
        first: numbers of first values to describe, by column; by default all.

    Returns:
        ``steps``, the digest of the steps that a column comes from; ``values``, the number of its values and their
        digest, or None if a value is its id.
    """
    origins = task.data.preprocessor.origins
    id_values = task.data.id_values
    columns = {}
    for name in {**origins, **task.data.vocab, **id_values}:
        described = None
        kind = _raw_kind(task, name, dynamic)
        if kind is not None:
            described = [0, kind]
        elif name in id_values:
            values = id_values[name][: (first or {}).get(name)]
            described = [len(values), _digest_of(values)]
        columns[name] = {"steps": origins.get(name), "values": described}
    return columns


def check_ids_stay(
    checkpoint: str,
    task: Task,
    together: CheckpointRanks,
    *,
    later: bool = False,
    schema: BatchSchema | None = None,
) -> None:
    """Refuses rows with other values behind their ids and numbers than a checkpoint's training had.

    Args:
        checkpoint: path of a checkpoint without damage.
        task: the task that has the rows.
        together: the ranks that call it.
        later: whether further ids may follow those of the checkpoint, as in a new run that begins with its weights.
        schema: schema of the batches. If it has dynamic ids, which mean themselves on any day, its other columns alone
            are compared; else all columns are.

    Raises:
        DataError: an id or a number stands for another value than in training, or what is recorded cannot be read.
    """
    then = read_checkpoint(checkpoint).manifest["content"].get(MEANING)
    if then is None:
        if together.rank == 0:
            print(
                f"note: {checkpoint}: does not say what its ids stand for: not compared"
            )
        return
    first = {}
    for name, column in then.items():
        if later and column["values"]:
            first[name] = column["values"][0]
    dynamic = schema.dynamic if schema else []
    read = set(schema.keys if schema else [])
    # Rows of a training without dynamic ids go to these by the numbering of then.
    now = meaning_of_ids(task, (), first)
    for name in sorted(then.keys() & now.keys()):
        before, after = then[name]["values"], now[name]["values"]
        steps = {then[name]["steps"], now[name]["steps"]} - {None}
        if len(steps) > 1:
            difference = (
                "came from other steps or rows: its values stand for something else"
            )
        elif before and before[1] in _RAW_KINDS:
            kind = _raw_kind(task, name, dynamic)
            if before[1] == kind:
                continue
            difference = f"had dynamic ids in training, which were {before[1]}, and has {kind or 'none'} now"
        elif before == after:
            continue
        elif dynamic and read.isdisjoint(task.same_ids(name)):
            # No table has a row of these ids.
            continue
        else:
            had = f"{before[0]:,} values" if before else "no numbering of its own"
            difference = f"had {had} in training, whose ids now stand for others"
        raise DataError(
            f"{checkpoint}: column '{name}' {difference}; give rows by FittedPreprocessor.transform of the first "
            "run, or train anew"
        )


def _digest_of(values: Any) -> str:
    """Returns the SHA-256 of values (N,), whole numbers or text, in their order.

    Texts are joined by NUL. If a text has a NUL itself, the lengths count too.
    """
    array = values if isinstance(values, pa.Array) else pa.array(values)
    if pa.types.is_primitive(array.type):
        numbers = np.ascontiguousarray(array.to_numpy(zero_copy_only=False))
        return hashlib.sha256(numbers.data).hexdigest()
    texts = array.cast(pa.large_string()).fill_null("None")
    whole = pa.LargeListArray.from_arrays([0, len(texts)], texts)
    nul = pa.scalar("\0", pa.large_string())
    joined = np.frombuffer(pc.binary_join(whole, nul)[0].as_buffer(), np.uint8)
    digest = hashlib.sha256(joined.data)
    # With more NULs than joints a text has one itself.
    if np.count_nonzero(joined == 0) >= max(len(texts), 1):
        lengths = pc.binary_length(texts).to_numpy().astype("<i8")
        digest.update(hashlib.sha256(lengths.data).digest())
    return digest.hexdigest()


def ended(folder: Path) -> bool:
    """Whether a run has ended: all epochs trained, stopped early, or diverged."""
    if (folder / "summary.json").exists():
        return True
    records = records_in(folder)
    return bool(records) and records[-1]["kind"] == "error"


def records_before(checkpoint: str, run: Path) -> list[str]:
    """Returns the lines of a run's ``metrics.jsonl`` up to one of its checkpoints."""
    count = read_checkpoint(checkpoint).manifest["content"]["position"]["records"]
    # The others are of the process, and no part of the course of the training.
    kinds = ("train", "eval", "stop")
    records = [record for record in records_in(run) if record["kind"] in kinds]
    return [json.dumps(record) for record in records[:count]]


def find_checkpoint(flag: str, location: str, together: CheckpointRanks) -> str:
    """Returns the path of the last good checkpoint at a location. Collective.

    Args:
        flag: flag by which the user named the location, for messages.
        location: path or address of a checkpoint, of a folder of checkpoints, or of a run folder.
        together: the ranks that call it.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    for folder in _folders_at(location):
        path = newest_good(folder, together)
        if path is not None:
            return path
    message = damage(location, together)
    if message is not None:
        raise CheckpointError(
            f"{flag}{location}: {message}; give a run folder, or a checkpoint in one"
        )
    return location if is_url(location) else str(Path(location).absolute())


def _folders_at(location: str) -> list[CheckpointFolder]:
    roots = (location, f"{location.rstrip('/')}/{CHECKPOINTS}")
    return [CheckpointFolder(root) for root in roots]


def checkpoint_to_export(
    location: str,
    which: str | None,
    together: CheckpointRanks,
    *,
    restores: bool = True,
) -> tuple[str, str]:
    """Returns the path of the checkpoint to export or publish, and a description of the choice. Collective.

    Args:
        location: path or address of a run folder, of a folder of checkpoints, or of one checkpoint.
        which: ``best`` (by the figure that ``train.early_stop.metric`` watched), ``last``, or a number of steps; None
            for the best if the run has marked one, else the last.
        together: the ranks that call it.
        restores: whether the run ends with its best weights, see ``train.early_stop.restore``; if it does not, None
            stands for the last.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    steps: list[int] = []
    for folder in _folders_at(location):
        steps = together.on_main(folder.steps)
        if steps:
            break
    best = together.on_main(folder.best)
    if which is None:
        which = "best" if restores and best in steps else "last"
    if which == "last":
        path = find_checkpoint("", location, together)
        return path, "the last" if steps else "the named"
    step: Any = best
    text = "the best"
    if which != "best":
        step = int(which) if which.isdecimal() else None
        text = f"of step {which}"
    message: str | None = "there is no such checkpoint"
    if step in steps:
        message = damage(folder.path(step), together)
    if message is not None:
        raise CheckpointError(
            f"--checkpoint {which}: {message}; give last, or one of the steps {listed(map(str, sorted(steps)))}; best "
            "is of runs with train.early_stop.metric"
        )
    return folder.path(step), text


def say_how_to_resume(checkpointer: Checkpointer | None, run: Path) -> None:
    """Prints how to go on with a run that ends early, if a checkpoint has been saved.

    Two ranks print it, because one of them may be gone.
    """
    steps = checkpointer.folder.steps() if checkpointer else []
    if steps and int(os.environ.get("RANK", "0")) < 2:
        print(
            f"saved up to step {steps[0]:,}: to go on from there, give the same command with --run_dir {run}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def hinting_at_resume(checkpointer: Checkpointer | None, run: Path) -> Iterator[None]:
    """Says how to resume after an error, such as a lost rank or a missing file, if a checkpoint has been saved."""
    try:
        yield
    except (RunStoppedError, TrainingDivergedError):
        # Both say what is saved.
        raise
    except Exception:
        say_how_to_resume(checkpointer, run)
        raise


def a_neighbour_died(processes: Path = Path("/proc")) -> bool:
    """Whether another rank under this rank's torchrun has died; False if that cannot be seen."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    return (
        0
        < children_of(os.getppid(), processes)
        < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )


@contextmanager
def asked_to_stop(
    before_end: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM has come; schedulers send it some seconds before they kill.

    The signals of the first five seconds count as one, see :func:`torchx_apps.process.once`; a later one ends the
    process at once. After a step the ranks agree to stop, save, and end with the exit code of a job that the signal
    stopped. Where a rank has died, so that torchrun stops the others, ranks cannot agree: the first signal ends the
    process, after a call of ``before_end``.
    """
    stop_requested = False

    def ask() -> None:
        nonlocal stop_requested
        stop_requested = True
        if a_neighbour_died():
            before_end()
            end_now()

    previous_handler = signal.signal(signal.SIGTERM, once(ask, end_now))
    try:
        yield lambda: stop_requested
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
