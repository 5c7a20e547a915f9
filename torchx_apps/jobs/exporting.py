"""From a live model and its task to a bundle in a folder, with the command that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.schema import BatchSchema
from torchx_apps.jobs.report import StageProgress, program
from torchx_apps.tasks.job import Export, Task

BUNDLE = "bundle"


def export_task(
    model: DistributedModelParallel,
    task: Task,
    schema: BatchSchema,
    runtime: Runtime,
    out: Path,
    *,
    details: Mapping[str, Any],
    **settings: Any,
) -> Manifest:
    """Exports the model with the catalogue and the users of its task; every rank calls it.

    Args:
        model: from :func:`hybrid_parallel`.
        task: its data.
        schema: of its batches.
        runtime: this process's place in the job.
        out: the folder to make.
        details: JSON values for the certificate.
        settings: of :func:`torchrec_ext.retrieval.exporting.export.export`.

    Raises:
        BundleError: the model or the data cannot be served.
    """
    if not hasattr(task, "export_data"):
        raise BundleError(
            f"the task {type(task).__name__} has no method export_data(schema), which says what the catalogue and the users "
            "are; see "
            "torchx_apps.tasks.export_data, or call torchrec_ext.retrieval.exporting.export.export with them"
        )
    found = task.export_data(schema)
    details = {"data": task.name, "ranks": runtime.world_size, **details}
    with StageProgress(runtime, "export", bytes_of=("tables",)) as progress:
        return export(model, out, **vars(found), details=details, progress=progress, **settings)


def end_with_bundle(
    when: Export,
    model: DistributedModelParallel,
    task: Task,
    schema: BatchSchema,
    runtime: Runtime,
    out: Path,
    details: Mapping[str, Any],
) -> None:
    """The bundle that a run ends with; rank 0 says where it is and how to serve it, or why there is none.

    Raises:
        BundleError: ``require``, and there can be none.
    """
    try:
        manifest = export_task(model, task, schema, runtime, out, details=details, overwrite=True)
    except BundleError as error:
        if when == "require":
            raise
        if runtime.is_main:
            print(f"\nno bundle: {error}")
        return
    if runtime.is_main:
        print(f"\n{describe_bundle(manifest, out)}", flush=True)


def check_exportable_to_onnx(model: nn.Module, skip: Sequence[str]) -> None:
    """Refuses a model with towers that no ONNX file can be made of, before minutes of loading."""
    from torchrec_ext.retrieval.bundle.audit import LiveModel
    from torchrec_ext.retrieval.onnx.onnx_bundle import check_exportable

    check_exportable({name: own["class"] for name, own in LiveModel(model).towers.items()}, skip)


def write_onnx_files(bundle: Path, out: Path, skip: Sequence[str] = (), *, overwrite: bool = False) -> str:
    """Writes a bundle's networks as ONNX files, and says what was written; see :func:`export_bundle`."""
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.onnx import onnx_bundle

    return onnx_bundle.describe_onnx(
        onnx_bundle.export_bundle(Bundle.load(bundle, verify=False), out, skip=skip, overwrite=overwrite), out
    )


def describe_bundle(manifest: Manifest, out: Path) -> str:
    """What a bundle is, and the command that serves it."""
    items, users, apart = (
        manifest.content["coverage"]["items"],
        manifest.content["users"],
        manifest.parity["greatest_difference"],
    )
    whom = f" and {users['count']:,} users" if users else ""
    warning = manifest.certificate.get("warning")
    return (f"warning: {warning}\n" if warning else "") + (
        f"bundle: {out} ({manifest.digest[:12]}: {items:,} items{whom}; its logits are the trained model's within "
        f"{apart:.1g})\n"
        f"serve it: {program('torchx')} run rec.serve.http --bundle {out}"
    )
