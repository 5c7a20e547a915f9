"""Where a run begins: anew, or at a checkpoint that --resume names or finds; and a signal that asks it to stop.

saved_job(): the Job of a run folder, from its recipe and its ``config.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union

from torchrec_ext.schema import DataError
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointFolder, Together, damage, newest_good
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url
from torchx_apps.cli.command_line import built_in_recipes, load_recipe
from torchx_apps.cli.link_watch import children_of
from torchx_apps.cli.overrides import field_hint, is_group
from torchx_apps.cli.sigterm import end_now, once
from torchx_apps.tasks.job import Job

CHECKPOINTS, LAUNCH = "checkpoints", "launch"
_NO_LAUNCH = ("", "none")  # without torchrun, and where torchrun was given no --rdzv-id: then launches share it


def newest_run(recipe: str, runs: Path = Path("runs"), *, launch: str | None = None) -> Path | None:
    """The run folder that ``--resume auto`` goes on in where no ``--run-dir`` names one.

    Args:
        recipe: the newest of its run folders with checkpoints.
        runs: where they are.
        launch: only that of this launch, see :func:`launch_id`: what a rank that was started again goes on in.
    """
    found = [
        folder.parent for folder in runs.glob(f"{recipe}-*/{CHECKPOINTS}") if CheckpointFolder(str(folder)).steps()
    ]
    if launch is not None:
        found = [
            folder
            for folder in found
            if (folder / LAUNCH).is_file() and (folder / LAUNCH).read_text().strip() == launch
        ]
    return max(found, key=lambda folder: folder.name, default=None)


def newest_networks(recipe: str, runs: Path = Path("runs"), *, launch: str | None = None) -> Path | None:
    """The same for the folder of a job of several networks."""
    found = [
        path.parent for path in runs.glob(f"networks-{recipe}-*/{LAUNCH}") if launch in (None, path.read_text().strip())
    ]
    return max(found, key=lambda folder: folder.name, default=None)


def common_checkpoints(folders: Mapping[str, CheckpointFolder], together: Together) -> dict[str, str]:
    """By name the checkpoints of the newest step of which each folder has a good one; none where there is no such step."""
    steps = [set(folder.steps()) for folder in folders.values()]
    for step in sorted(set.intersection(*steps) if steps else set(), reverse=True):
        paths = {name: folder.path(step) for name, folder in folders.items()}
        wrong = next((told for path in paths.values() if (told := damage(path, together))), None)
        if wrong is None:
            return paths
        print(f"checkpoints of step {step}: {wrong}; those before it are used", flush=True)
    return {}


def ended(folder: Path) -> bool:
    """Whether a run was trained to its end, which may be that it diverged."""
    if (folder / "summary.json").exists():
        return True
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return bool(lines) and json.loads(lines[-1])["kind"] == "error"


def launch_id() -> str:
    """What all attempts of one launch have in common and no other launch has; empty without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether this rank's torchrun counts a restart.

    Its count is that of one host: it stays 0 where the ranks are started again because another host's came back, and on
    a host that has taken the place of another. See :func:`where_to_begin`.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def begun(folder: Path | None) -> bool:
    """Whether an earlier attempt of this launch has begun the run of a folder, and has not ended it."""
    if folder is None or launch_id() in _NO_LAUNCH or ended(folder):
        return False
    named = folder / LAUNCH
    return named.is_file() and named.read_text().strip() == launch_id()


def where_to_begin(
    run_dir: Path | None, resume: str, newest: Callable[..., Path | None], name: str, *, counted: bool
) -> tuple[Path, bool]:
    """The folder of the run, and whether an earlier attempt of this launch was there before; one rank finds it for all.

    Args:
        run_dir: the folder that the user has named.
        resume: as the user has given it.
        newest: the newest folder of the recipe; with ``launch=`` only that of this launch.
        name: of a new folder in ``runs``, which the date follows.
        counted: whether the torchrun of some rank counts a restart.
    """
    own = run_dir or newest(launch=launch_id())
    again = counted or begun(own)
    found = own if again else run_dir or (newest() if resume == "auto" else None)
    return found or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", again


def resume_from(resume: str, checkpointer: Checkpointer, *, again: bool = False) -> str | None:
    """The checkpoint to begin from, the same on every rank; None to begin anew.

    Args:
        resume: ``never``; ``auto`` for the last good one of this run's folder; or a path or address, see
            :func:`find_checkpoint`.
        checkpointer: of this run.
        again: an earlier attempt of this launch was here before: what it has saved goes before a path.

    Raises:
        CheckpointError: there is none at ``resume``, or it is damaged.
    """
    path = checkpointer.last_good() if again or resume == "auto" else None
    if path is None and resume not in ("never", "auto"):
        return find_checkpoint("--resume ", resume, checkpointer.together)
    if resume != "never" and checkpointer.together.rank == 0:
        print(f"resuming from {path}" if path else "no checkpoint to resume from: the run begins anew", flush=True)
    return path


def find_checkpoint(flag: str, place: str, together: Together, which: str = "last") -> str:
    """A good checkpoint at a place.

    Args:
        flag: how the user named the place, for messages.
        place: the path or address of a checkpoint, of a folder of checkpoints, or of a run folder.
        together: all ranks call it.
        which: ``last``, ``best`` (of the figure that ``train.early_stop.metric`` watched), or a number of steps.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    for root in (place, f"{place.rstrip('/')}/{CHECKPOINTS}"):
        folder = CheckpointFolder(root)
        if which != "last" and (steps := together.on_main(folder.steps)):
            return _chosen(folder, which, steps, together)
        if which == "last" and (path := newest_good(folder, together)) is not None:
            return path
    wrong = damage(place, together)
    if wrong is not None:
        raise CheckpointError(f"{flag}{place}: {wrong}; give a run folder, or a checkpoint in one")
    if which != "last":
        raise CheckpointError(f"{flag}{place} is one checkpoint: there is no {which!r} of it; give the run folder")
    return place if is_url(place) else str(Path(place).absolute())


def _chosen(folder: CheckpointFolder, which: str, steps: Sequence[int], together: Together) -> str:
    listed = ", ".join(map(str, sorted(steps)))
    step = best_step(folder, together) if which == "best" else int(which) if which.isdecimal() else None
    if step is None and which == "best":
        raise CheckpointError(
            "--checkpoint best: no evaluation of this run was marked as the best; train with train.early_stop.metric, "
            "or give "
            f"last or one of the steps {listed}"
        )
    if step not in steps:
        raise CheckpointError(
            f"--checkpoint {which}: there is no such checkpoint; give best, last or one of the steps {listed}"
        )
    if (wrong := damage(folder.path(step), together)) is not None:
        raise CheckpointError(f"--checkpoint {which}: {wrong}; give last, or one of the steps {listed}")
    return folder.path(step)


def best_step(folder: CheckpointFolder, together: Together) -> int | None:
    """The step of the best evaluation, where one was marked and its checkpoint is there."""
    noted = together.on_main(lambda: folder.noted("best.json"))
    step = noted.get("step") if isinstance(noted, dict) else None
    return step if step in together.on_main(folder.steps) else None


def served_checkpoint(place: str, which: str | None, together: Together, *, restores: bool = True) -> tuple[str, str]:
    """The checkpoint to export or publish, and which one it is in words.

    Args:
        place: a run folder, or a folder of checkpoints.
        which: ``best``, ``last``, a number of steps, or the path or address of another place; None for the best where
            the run has marked one, else the last.
        together: all ranks call it.
        restores: whether the run ends with its best weights, see ``train.early_stop.restore``; else None is the last.

    Raises:
        CheckpointError: see :func:`find_checkpoint`.
    """
    if which is not None and which not in ("best", "last") and not which.isdecimal():
        return find_checkpoint("--checkpoint ", which, together), f"as given by --checkpoint {which}"
    if which is None:
        marked = [best_step(CheckpointFolder(root), together) for root in (place, f"{place.rstrip('/')}/{CHECKPOINTS}")]
        which = "best" if restores and any(step is not None for step in marked) else "last"
    return find_checkpoint("", place, together, which), {"best": "the best", "last": "the last"}.get(
        which, f"of step {which}"
    )


@contextmanager
def telling_how_to_go_on(checkpointer: Checkpointer | None) -> Iterator[None]:
    """A fault in the data, such as a file that is gone, ends with how to go on once it is mended, where anything is saved."""
    try:
        yield
    except DataError as error:
        if checkpointer is None or not checkpointer.folder.steps():
            raise
        raise DataError(f"{error}; then go on with --resume auto") from error


def a_neighbour_died(processes: Path = Path("/proc")) -> bool:
    """Whether a rank of this host that the same torchrun has started is gone; False where that cannot be seen."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    return 0 < children_of(os.getppid(), processes) < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come, which schedulers send some seconds before they kill.

    Those of the first five seconds are one, see :func:`torchx_apps.cli.sigterm.once`; a later one ends the process at
    once. The ranks answer together after a step, save, and end with the exit code of a job that the signal stopped.
    Where a rank has died, for which torchrun stops the others, there is no answering together: the first signal ends
    the process.
    """
    asked = False

    def ask() -> None:
        nonlocal asked
        asked = True
        if a_neighbour_died():
            end_now()

    before = signal.signal(signal.SIGTERM, once(ask, end_now))
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)


CONFIG = "config.json"


def saved_job(run: Path, recipe: str | None = None) -> Job:
    """The job that wrote a run folder.

    Args:
        run: the folder.
        recipe: that made it; by the name in ``config.json`` where not given, which must be a built-in one.

    Raises:
        ValueError: there is no such folder, its recipe is not built in, or its configuration is of another one.
    """
    path = run / CONFIG
    try:
        saved = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name a run folder, such as runs/two_tower-DATE"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); name another run folder") from None
    name = saved.get("name")
    if recipe is None and name not in built_in_recipes():
        raise ValueError(f"{path}: recipe {name!r} is not built in; say where it is: --recipe my_recipe.py:job")
    job = load_recipe(recipe or name)
    if job.name != name:
        raise ValueError(
            f"--recipe {recipe}: its jobs are named {job.name!r}, {path} is of {name!r}; give the recipe of that run"
        )
    try:
        restored: Job = _restored(job, saved)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: does not fit the recipe as it is now ({error}); give what differs by --set"
        ) from None
    return restored


def _restored(config: Any, saved: Mapping[str, Any]) -> Any:
    """``config`` with the values of a JSON object."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not field.init or field.name not in saved or callable(value):
            continue
        told = saved[field.name]
        if is_group(value) and isinstance(told, dict):
            changes[field.name] = _restored(value, told)
        else:
            changes[field.name] = _value(field_hint(config, field.name), told)
    return dataclasses.replace(config, **changes)


def _value(hint: Any, told: Any) -> Any:
    """JSON to what a field of type ``hint`` holds."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(told, dict):
        group = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if group is not None:
            made: Any = group
            hints = typing.get_type_hints(made)
            return made(**{name: _value(hints[name], value) for name, value in told.items()})
    if isinstance(told, list):
        inner = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple), Any)
        return tuple(_value(inner, value) for value in told)
    if isinstance(told, str) and Path in kinds:
        return Path(told)
    return told
