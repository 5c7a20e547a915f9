"""The stages of torchx_apps.pipeline: what each makes, of which settings, and as which process."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchx_apps.cli.command_line import describe_keys, setting_keys
from torchx_apps.cli.export_flags import (
    add_bundle_flags,
    build_export_parser,
    check_export,
)
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.jobs.tracking import JOB
from torchx_apps.recipes.by_name import load_job, load_recipe
from torchx_apps.tasks.job import check_elastic

_OWN_KEYS = {
    "data.name": "it is the folder data of --out",
    "export": "the last stage exports",
}
# Settings that change how fast a stage is, or what it prints, and not what it makes.
_FREE = {
    "out",
    "overwrite",
    "threads",
    "memory",
    "pictures",
    "train.hang_s",
    "train.log_every",
}
# Prefix of the record of a log.
_LOG = "log "
# Blocks read from each file of a log, to compare it with its record.
_BLOCKS = 16
# Bytes of a block.
_BLOCK = 2**16
# Variables that make a process one of several.
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One app of the pipeline, with its flags and result.

    Args:
        app: name of the app's module in ``torchx_apps``.
        flags: the app's flags.
        folder: folder of the result.
        mark: file in it that is written last.
        settings: the settings that decide the result, by name.
        keys: text that describes every key of the stage.
        source: file of the stage before, of which the result is made; None for the first stage.
        logs: files and folders that the first stage reads, as far as its recipe's config names them.
        checkpoints: path or address of the checkpoints from which the stage resumes; empty if it begins anew.
    """

    app: str
    flags: Sequence[str]
    folder: Path
    mark: str
    settings: Mapping[str, str]
    keys: str
    source: Path | None = None
    logs: Sequence[Path] = ()
    checkpoints: str = ""

    @property
    def whole(self) -> bool:
        """Whether the result is complete."""
        return (self.folder / self.mark).is_file()

    @property
    def begun(self) -> bool:
        """Whether there is a result, or part of one to continue."""
        if self.whole or not (self.checkpoints and self.folder.exists()):
            return self.whole
        from torchrec_ext.train.checkpoint.folder import CheckpointFolder

        return bool(CheckpointFolder(self.checkpoints).steps())

    def wait(self) -> None:
        """Waits for the complete result; if the first rank fails to make it, torchrun ends this rank."""
        while not self.whole:
            time.sleep(1)

    def record(self) -> dict[str, str]:
        """Returns the settings with the SHA-256 of the input file, or with a description of the input logs.

        A file or log that is not there any more is left out.
        """
        record = dict(self.settings)
        if self.source is not None and self.source.is_file():
            record[f"SHA-256 of {self.source}"] = _digest(self.source)
        for log in self.logs:
            if log.exists():
                record[f"{_LOG}{log}"] = describe_log(log, but=self.folder.parent)
        return record


def stages_of(options: argparse.Namespace) -> dict[str, Stage]:
    """Returns the three stages by app, after all checks possible before the first one runs.

    Raises:
        ValueError: a flag or setting of some stage is wrong; the message names it.
    """
    out: Path = options.out
    data = _data_stage(options, out / "data")
    run = _run_stage(options, out / "run", data)
    flags = _bundle_flags(options)
    bundle = Stage(
        app="export",
        flags=[
            str(run.folder),
            f"--out={out / 'bundle'}",
            f"--recipe={options.recipe}",
            *flags,
        ],
        folder=out / "bundle",
        mark="manifest.json",
        settings={"flags": " ".join(flags)},
        keys=" ".join(["flags", *flags]),
        source=run.folder / run.mark,
    )
    if not bundle.whole:
        check_export(build_export_parser().parse_args(bundle.flags), bundle.folder)
    return {stage.app: stage for stage in (data, run, bundle)}


def _data_stage(options: argparse.Namespace, folder: Path) -> Stage:
    prefix = "preprocess."
    settings = [
        item.removeprefix(prefix) for item in options.set if item.startswith(prefix)
    ]
    flags = [
        "--recipe",
        options.preprocess,
        *(f"--set={item}" for item in settings),
        f"--out={folder}",
    ]
    if options.engine:
        flags.append(f"--engine={options.engine}")
    try:
        job = apply_overrides(load_job(options.preprocess), settings)
    except ValueError as error:
        message = (
            str(error)
            .replace("--set ", f"--set {prefix}")
            .replace("--recipe ", "--preprocess ")
        )
        raise ValueError(message) from None
    if job.out:
        raise ValueError(
            f"--set preprocess.out={job.out}: it is the folder data of --out; leave it out"
        )
    job = dataclasses.replace(job, engine=options.engine or job.engine)
    return Stage(
        app="preprocess",
        flags=flags,
        folder=folder,
        mark="summary.json",
        settings=_settings(job, options.preprocess),
        keys=describe_keys(job),
        logs=_logs_of(job.config),
    )


def _logs_of(config: Any) -> list[Path]:
    """Returns the files and folders in a recipe's config, given by absolute path or from the current folder."""
    if not dataclasses.is_dataclass(config):
        return []
    logs = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = value if isinstance(value, tuple | list) else (value,)
        for each in values:
            # Any text may name a log; one that names no file is another setting.
            if each and isinstance(each, str | Path) and Path(each).exists():
                logs.append(Path(each))
    return logs


def describe_log(log: Path, *, but: Path) -> str:
    """Describes the files of a log: their number, bytes, and a digest of names, sizes and 16 blocks of each.

    Times do not count, so that a log that was touched or copied is the same. Of a large file the blocks are spread
    evenly over it, the first and the last among them, so that a log of any size takes a moment: a change that keeps the
    size and is between the blocks is not seen.

    Args:
        log: a file or a folder.
        but: folder whose files do not count, even if it is in the log's.
    """
    paths = [log] if log.is_file() else sorted(log.rglob("[!.]*"))
    digest = hashlib.sha256()
    count = 0
    total = 0
    for path in paths:
        if not path.is_file() or but.resolve() in path.resolve().parents:
            continue
        count += 1
        size = path.stat().st_size
        total += size
        digest.update(f"{path.relative_to(log)}\0{size}\0".encode())
        starts = {
            max(0, (size - _BLOCK) * number // (_BLOCKS - 1))
            for number in range(_BLOCKS)
        }
        with path.open("rb") as file:
            for start in sorted(starts):
                file.seek(start)
                digest.update(file.read(_BLOCK))
    return f"{count:,} files, {total:,} bytes, {digest.hexdigest()[:16]}"


def _run_stage(options: argparse.Namespace, folder: Path, data: Stage) -> Stage:
    settings = [item for item in options.set if not item.startswith("preprocess.")]
    for item in settings:
        key = item.partition("=")[0]
        if key in _OWN_KEYS:
            raise ValueError(f"--set {item}: {_OWN_KEYS[key]}; leave it out")
    settings += [f"data.name={data.folder}", "export=never"]
    job = apply_overrides(load_recipe(options.recipe), settings)
    _check_training(job, options.recipe)
    interaction = getattr(job.model, "interaction", "dot")
    if options.index != "exact" and interaction not in ("dot", "cosine", "gmf"):
        raise ValueError(
            f"--index {options.index}: FAISS searches products, and logits of model.interaction={interaction} are "
            "none; take --index exact, or model.interaction=dot"
        )
    flags = ["--recipe", options.recipe, *(f"--set={item}" for item in settings)]
    return Stage(
        app="train",
        flags=[*flags, f"--run-dir={folder}", "--resume=auto"],
        folder=folder,
        mark="summary.json",
        settings=_settings(job, options.recipe),
        keys=describe_keys(job),
        source=data.folder / data.mark,
        checkpoints=job.checkpoint.folder or str(folder / "checkpoints"),
    )


def _check_training(job: Any, recipe: str) -> None:
    """Refuses settings before the preprocessing if the ranks would refuse them after it."""
    from torchrec_ext.data.datasets.config import SequenceConfig

    if isinstance(job.data, SequenceConfig):
        raise ValueError(
            f"--recipe {recipe}: it reads the log itself, and no preprocessed rows; take bst, or rec.train.hybrid"
        )
    check_elastic(job)
    if not job.checkpoint.saves:
        raise ValueError(
            "checkpoint.epochs=0 with checkpoint.steps=0: the bundle is made of a checkpoint; leave one of them"
        )
    # Only the machines that train can tell their GPUs.
    if "RANK" in os.environ:
        import torch

        from torchrec_ext.distributed.runtime import GPUS, choose_device

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local = (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        world_size = int(os.environ["WORLD_SIZE"])
        choose_device(
            job.device,
            *local,
            gpus,
            os.environ.get(GPUS, ""),
            one_host=world_size == local[1],
        )
        job.sync.table_ranks(world_size)


def _bundle_flags(options: argparse.Namespace) -> list[str]:
    """Returns the export flags with values other than their defaults, as one argument each."""
    parser = argparse.ArgumentParser(add_help=False)
    add_bundle_flags(parser)
    flags = []
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(options, name)
        if value == default:
            continue
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        flags += [f"{flag}={each}" for each in values]
    return flags


def _settings(job: Any, recipe: str) -> dict[str, str]:
    """Returns the keys of a job and the recipe, with the SHA-256 of the file of a user's own recipe."""
    settings = {
        key.path: key.value for key in setting_keys(job) if key.path not in _FREE
    }
    module, colon, _ = recipe.rpartition(":")
    if colon:
        file = module
        if not module.endswith(".py"):
            spec = importlib.util.find_spec(module)
            assert spec is not None, "load_recipe has imported it"
            file = str(spec.origin)
        settings[f"SHA-256 of {module}"] = _digest(Path(file))
    return {"recipe": recipe, **settings}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _records(file: Path) -> dict[str, dict[str, str]]:
    """Returns each stage's record by app; none before the first stage."""
    records: dict[str, dict[str, str]] = (
        json.loads(file.read_text()) if file.is_file() else {}
    )
    return records


def check_record(record: Path, stages: Mapping[str, Stage]) -> None:
    """Refuses a result made with other settings than the current ones, or from another result.

    Raises:
        ValueError: naming the setting and both values.
    """
    records = _records(record)
    for index, stage in enumerate(stages.values()):
        if not stage.begun:
            continue
        if stage.app not in records:
            raise ValueError(
                f"{stage.folder}: there is something that no pipeline has recorded in {record}; give another --out"
            )
        new = stage.record()
        old = records[stage.app]
        # Rows that were removed are made again, and compared then.
        later_known = (
            f"SHA-256 of {stage.source}"
            if stage.app == "train" and len(new) < len(old)
            else ""
        )
        for key in dict.fromkeys([*new, *old]):
            if new.get(key) == old.get(key) or key == later_known:
                continue
            # A log that is gone, or that an older version has not recorded, cannot be
            # compared.
            if key.startswith(_LOG) and not (key in new and key in old):
                continue
            later = ", ".join(
                str(each.folder) for each in list(stages.values())[index:]
            )
            raise ValueError(
                f"{key}={new.get(key, 'none')}: {stage.folder} was made with {old.get(key, 'none')}; go on with "
                f"that, give another --out, or remove {later}"
            )


def begin(stage: Stage, record: Path) -> None:
    """Records a stage's settings before its first file is written."""
    records = _records(record)
    records[stage.app] = stage.record()
    record.parent.mkdir(parents=True, exist_ok=True)
    # In one move, because a run that is killed while it writes must find its record
    # again.
    part = record.with_suffix(".part")
    part.write_text(json.dumps(records, indent=2) + "\n")
    part.replace(record)
    print(f"{stage.app}: to {stage.folder}", flush=True)


def _command(stage: Stage) -> tuple[list[str], dict[str, str]]:
    """Returns the command and environment of a stage as a single process, without the variables of a rank."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _RANK
    }
    # For trackers the stage is a run of its own; the training keeps the job's name.
    if JOB in environment:
        environment[JOB] += f"/{stage.app}"
    return [sys.executable, "-m", f"torchx_apps.{stage.app}", *stage.flags], environment


def run_alone(stage: Stage, record: Path) -> int:
    """Runs a stage as a process of its own, to free its memory before the training begins."""
    begin(stage, record)
    command, environment = _command(stage)
    return subprocess.run(command, env=environment, check=False).returncode


def become(stage: Stage, record: Path) -> NoReturn:
    """Replaces this process by a stage; its exit code and error are then this rank's."""
    begin(stage, record)
    sys.stdout.flush()
    command, environment = _command(stage)
    os.execve(command[0], command, environment)
