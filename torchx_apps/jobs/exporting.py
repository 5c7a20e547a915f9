"""Exports a live model and its task's data to a bundle in a folder, and names the command that serves it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torchrec.distributed.model_parallel import (
    DistributedModelParallel,
    get_unwrapped_module,
)

from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.data.prepare import SUMMARY
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.catalogue import ItemTable, UserTable
from torchrec_ext.retrieval.export import export
from torchrec_ext.retrieval.manifest import BundleError, Manifest
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.checkpoint.folder import CheckpointRanks, read_checkpoint
from torchrec_ext.train.checkpoint.load import load_checkpoint
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.report.progress import stage_lines
from torchx_apps.jobs.report import program, read_warning
from torchx_apps.jobs.resuming import check_ids_stay, checkpoint_to_export
from torchx_apps.jobs.setup import (
    as_loaded,
    load_task,
    loader_of,
    quieten_libraries,
    untrained_model,
)
from torchx_apps.jobs.tracking import tracked
from torchx_apps.tasks.dynamic_ids import with_live_ids
from torchx_apps.tasks.job import Export, Job, schema_of
from torchx_apps.tasks.task import Task

BUNDLE = "bundle"


def export_task(
    model: DistributedModelParallel,
    task: Task,
    schema: BatchSchema,
    runtime: Runtime,
    out: Path,
    *,
    details: Mapping[str, Any],
    loader: Any = None,
    catalogue: Sequence[str] = (),
    **settings: Any,
) -> Manifest:
    """Exports the model with the catalogue and the users of its task; every rank calls it.

    Args:
        model: sharded model, from :func:`hybrid_parallel`.
        task: task that the model was trained on.
        schema: schema of the model's batches.
        runtime: this rank's runtime.
        out: the folder to make.
        details: JSON values for the certificate.
        loader: loader of the training, whose dynamic ids are those that the bundle knows; None without such ids.
        catalogue: parquet files of the items to serve, see :meth:`Task.export_data`.
        settings: further arguments of :func:`torchrec_ext.retrieval.export.export`.

    Raises:
        BundleError: the model or the data cannot be served.
    """
    # Asked first, because the data of an export are read from all rows.
    if reason := task.unservable(get_unwrapped_module(model)):
        raise BundleError(reason)
    # A task of a user's own may know the catalogue of its training alone.
    data = task.export_data(schema, *([catalogue] if catalogue else []))
    if isinstance(loader, DynamicIdLoader):
        data = with_live_ids(data, task, loader)
    details = {"data": task.name, "ranks": runtime.world_size, **details}
    return export(
        model,
        out,
        **vars(data),
        details=details,
        progress=stage_lines(runtime, "export"),
        **settings,
    )


def bundle_of_run(
    when: Export,
    model: DistributedModelParallel,
    task: Task,
    schema: BatchSchema,
    runtime: Runtime,
    out: Path,
    **more: Any,
) -> str:
    """Exports the bundle of a run; returns its description, or the reason against a bundle. Collective.

    Raises:
        BundleError: ``when`` is ``require``, and the model or the data cannot be served.
    """
    try:
        # An earlier attempt of the run may have left its bundle.
        bundle = export_task(model, task, schema, runtime, out, overwrite=True, **more)
    except BundleError as error:
        if when == "require":
            raise
        return f"no bundle: {error}"
    return describe_bundle(bundle, out)


def describe_bundle(manifest: Manifest, out: Path) -> str:
    """Describes a bundle in a line, after any warning and before the command to serve it."""
    items = manifest.content["items"]["rows"]
    users = manifest.content["users"]
    rows = f"{items:,} items"
    if users:
        rows += f" and {users['rows']:,} users"
    lines = []
    if warning := manifest.certificate.get("warning"):
        lines.append(f"warning: {warning}")
    difference = f"{manifest.parity['greatest_difference']:.1g}"
    allowed = f"{manifest.parity['allowed']:.1g}"
    lines.append(
        f"bundle: {out} ({manifest.digest[:12]}: {rows}; its logits are the trained model's within {difference}, "
        f"{allowed} is allowed)"
    )
    index = manifest.content["index"]
    if "recall" in index:
        lines.append(
            f"index: {index['factory']} finds {index['recall']:.1%} of the {index['k']} best"
        )
    lines.append(f"serve it: {program('python')} -m torchx_apps.serve {out}")
    if users:
        table = UserTable.open(out, users["key"])
        first_user = table.ids.ids([0])[0]
        lines.append(f"then open http://127.0.0.1:8000/#user={quote(str(first_user))}")
    return "\n".join(lines)


def export_run(
    job: Job,
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    catalogue: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Loads a run's model on this job's ranks and writes its bundle; every rank calls it.

    Args:
        job: the run's job.
        run: the run's folder.
        out: the bundle's folder.
        checkpoint: name of the checkpoint, see :func:`torchx_apps.jobs.resuming.checkpoint_to_export`.
        catalogue: parquet files of the items to serve; the training's items if empty.
        settings: further arguments of :func:`torchrec_ext.retrieval.export.export`.
    """
    quieten_libraries()
    with Runtime.start(job.device, threads=job.threads, collectives="gloo") as runtime:
        together = CheckpointRanks(runtime)
        stop = job.train.early_stop
        location = job.checkpoint.folder or str(run)
        restores = bool(stop.metric and stop.restore)
        path, which = checkpoint_to_export(
            location, checkpoint, together, restores=restores
        )
        task = load_task(job, runtime)
        torch.manual_seed(job.train.seed)
        model = untrained_model(job, task)
        schema = schema_of(job, task, model)
        check_ids_stay(path, task, together, schema=schema)
        sharded, optimizer = hybrid_parallel(model, runtime, optimizer=job.optimizer)
        saved = read_checkpoint(path)
        state = model_state(sharded, optimizer)
        content, _ = load_checkpoint(saved, state, together)
        loader = None
        if job.ids.features:
            loader = loader_of(as_loaded(job, task), task, schema, runtime)
            loader.load_ids(content["loader"])
        details = {
            "recipe": job.name,
            "run": str(run),
            "checkpoint": path,
            "steps": saved.manifest["step"],
            **read_warning(run),
        }
        # One process tracks what all ranks make.
        context: Any = nullcontext({})
        if runtime.is_main:
            context = tracked(out, {**details, **settings}, folder="bundle")
        with context as figures:
            manifest = export_task(
                sharded,
                task,
                schema,
                runtime,
                out,
                details=details,
                loader=loader,
                catalogue=catalogue,
                **settings,
            )
            figures["bundle"] = {"digest": manifest.digest, **manifest.parity}
        if runtime.is_main:
            if catalogue:
                print(_describe_catalogue(job, task, out), flush=True)
            print(
                f"checkpoint: {which}, after {saved.manifest['step']:,} steps ({path})"
            )
            print(describe_bundle(manifest, out), flush=True)


def _describe_catalogue(job: Job, task: Task, bundle: Path) -> str:
    """Says how many items of a catalogue are new, how many of the training's it lacks, and what a new id reads."""
    items = ItemTable.open(bundle)
    item = str(task.data.roles.item)
    # By the steps, since the id of a hashed item is no value of the log.
    steps = task.data.preprocessor.only([item])
    rows = steps.online(dict.fromkeys(steps.request_columns, items.ids.arrow()))[item]
    known = int(np.isin(rows.values, task.data.item_ids).sum())
    new, gone = len(items) - known, task.data.num_items - known
    text = f"catalogue: {len(items):,} items, {new:,} of them new; {gone:,} items of the training are not in it"
    has_row = item in job.id_dropout or item in job.ids.features
    if task.data.form == "labels":
        summary = json.loads((task.data.folder / SUMMARY).read_text())
        has_row = has_row or summary["unknown"]["train"].get(item, 0.0) > 0
    if new and not has_row:
        text += (
            f"\nwarning: a new item's id reads row 0, which no training row has read; train with --id_dropout.{item} "
            "0.02, or rank new items by other means"
        )
    return text
