"""Trains on a folder of events as files come: each event once, predicted first; publishes a bundle every few seconds.

A checkpoint holds weights, optimizer, ids and the log's position together, so a run that is killed goes on as if it
had not been. Servers watch the file `current` beside the bundles, which names the newest one.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.data.loader.events import ITEM, USER, EventLoader
from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, Vocabulary
from torchrec_ext.data.preprocess.folders import disk_errors
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.ids import DynamicIds
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers
from torchrec_ext.retrieval.export import Renewal, export
from torchrec_ext.retrieval.manifest import BUNDLE_MANIFEST
from torchrec_ext.schema import BatchSchema
from torchrec_ext.sealed import remove_leftovers, write_whole
from torchrec_ext.train.checkpoint.folder import CheckpointRanks
from torchrec_ext.train.checkpoint.run import RunCheckpoints
from torchrec_ext.train.guards import RunStoppedError
from torchrec_ext.train.loop import TrainingRun, train
from torchx_apps.config import StreamOptions
from torchx_apps.jobs.report import program
from torchx_apps.jobs.resuming import asked_to_stop, find_checkpoint, hinting_at_resume
from torchx_apps.jobs.setup import (
    JobParts,
    plan_job,
    quieten_libraries,
    seeded,
    shard_job,
)
from torchx_apps.jobs.training import open_run, start_with
from torchx_apps.tasks.job import Job, schema_settings
from torchx_apps.tasks.stream_figures import Predictions

BUNDLES, CURRENT = "bundles", "current"


def run_stream(job: Job, options: StreamOptions) -> None:
    """Trains a job on its log until the log is idle, an event was the last, or SIGTERM comes.

    Args:
        job: the job, whose ``data`` is an :class:`EventsConfig`.
        options: where the run is, and when and where bundles are published.

    Raises:
        RunStoppedError: SIGTERM came; the run has been saved and a bundle published.
    """
    quieten_libraries()
    check_stream(job)
    with (
        Runtime.start(
            job.device, threads=job.threads, collectives=job.collectives
        ) as runtime,
        asked_to_stop() as stop,
        ExitStack() as closing,
    ):
        if runtime.world_size > 1:
            raise ValueError(
                f"{runtime.world_size} ranks: a log is trained on one rank yet; write -j 1x1"
            )
        model, events, loader, schema = _model_and_loader(job, stop)
        run = open_run(job, options.run_dir, runtime, closing)
        assert run.checkpointer is not None, "checkpoint.steps is 1 or more"
        folder = options.bundles or run.path / BUNDLES
        # Before the first step; a bundle is written much later.
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        plan, plan_text = plan_job(job, model, runtime)
        print(f"\n{plan_text}\n", flush=True)
        parts = JobParts(job, model, schema, loader, plan, plan_text)
        parallel, optimizer = shard_job(parts, runtime)
        if job.start.path and not run.checkpoint:
            together = CheckpointRanks(runtime)
            start_with(
                find_checkpoint("start.path=", job.start.path, together),
                parts,
                parallel,
                optimizer,
                together,
            )
        predictions = Predictions(events, calibrated=getattr(model, "calibrated", True))
        about = {"recipe": job.name, "run": str(run.path)}
        renewal = Renewal()

        def export_now(out: Path) -> None:
            details = {**about, "events": events.events}
            export_ids(parallel, loader.ids, out, details, renewal)

        publisher = Publisher(options, folder, export_now)
        checkpoints = StreamCheckpoints(
            run.checkpointer, job.checkpoint, resume=run.checkpoint, publisher=publisher
        )
        events.waiting = publisher.if_due
        # Dropout begins alike in each new run; a resumed one restores its state.
        torch.manual_seed(job.train.seed + 1)
        with hinting_at_resume(run.checkpointer, run.path):
            train(
                parallel,
                optimizer,
                loader,
                runtime,
                job.train,
                log=run.folder.log if run.folder is not None else None,
                sync=job.sync,
                checkpoints=checkpoints,
                observer=predictions,
            )
        if not events.events and not stop():
            raise ValueError(
                f"data.folder={job.data.folder}: had no event to train on; a log's files end in .jsonl or .ndjson"
            )
        print(f"\n{events.events:,} events so far")
        if publisher.newest is not None:
            print(f"bundle: {publisher.newest}")
            print(
                f"serve it: {program('python')} -m torchx_apps.serve {folder / CURRENT}"
            )
        if run.tracking is not None:
            run.tracking.end()
        if stop():
            raise RunStoppedError(
                f"stopped by a signal after {events.events:,} events, which are saved; go on with the same --run_dir"
            )


def check_stream(job: Job) -> None:
    """Refuses settings that a log cannot have, before anything is loaded.

    Raises:
        ValueError: naming the setting.
    """
    label = job.data.label
    negatives = job.loader.negatives
    refusals = (
        (
            job.checkpoint.steps < 1,
            f"checkpoint.steps={job.checkpoint.steps}",
            "a log has no epochs; set 1 or more",
        ),
        (
            job.train.epochs != 1,
            f"train.epochs={job.train.epochs}",
            "each event is trained once; leave it out",
        ),
        (
            bool(label) and negatives > 0,
            f"data.label={label}",
            "events have labels of their own; set loader.negatives=0",
        ),
        (
            job.loader.label is not None,
            f"loader.label={job.loader.label}",
            "name the log's column by data.label",
        ),
        (
            job.loader.weight is not None,
            f"loader.weight={job.loader.weight}",
            "events have no weights; leave it out",
        ),
        (
            job.loader.sampling != "uniform",
            f"loader.sampling={job.loader.sampling}",
            "a batch draws from its own events",
        ),
        (
            bool(job.pretrained),
            f"pretrained.{next(iter(job.pretrained), '')}",
            "ids come and go; leave it out",
        ),
        (
            job.export != "never",
            f"export={job.export}",
            "bundles are published anyway; leave it out",
        ),
    )
    for applies, setting, why in refusals:
        if applies:
            raise ValueError(f"{setting}: {why}")


def _model_and_loader(
    job: Job, stop: Callable[[], bool]
) -> tuple[nn.Module, EventLoader, DynamicIdLoader, BatchSchema]:
    """Builds a job's model and its loader of the log's events.

    Raises:
        ValueError: the model reads other columns, its loss needs other rows, or an id's table has no capacity.
    """
    config = seeded(job)
    label = job.data.label or None
    policies = job.ids.features
    if set(policies) != {USER, ITEM}:
        raise ValueError(
            f"ids of {', '.join(policies) or 'nothing'}: give ids.features.{USER} and .{ITEM} a capacity"
        )
    torch.manual_seed(job.train.seed)
    model: Any = job.build(
        job.model,
        EventTables({name: policy.capacity for name, policy in policies.items()}),
    )
    if isinstance(model, TowerModel):
        model.expect_rows(negatives=config.negatives, label=label)
        if label is None and config.negatives:
            model.begin_at([1 / (1 + config.negatives)])
    schema = model.schema(**schema_settings(job)).with_dynamic(policies)
    if sorted(schema.keys) != sorted(policies) or schema.dense:
        raise ValueError(
            f"recipe '{job.name}': its model reads {[*schema.keys, *schema.dense]}; events have {USER} and {ITEM} alone"
        )
    events = EventLoader(
        job.data,
        schema,
        batch_size=config.batch_size,
        negatives=config.negatives,
        seed=config.seed,
        stop=stop,
    )
    return (
        model,
        events,
        DynamicIdLoader(events, schema, policies, every=job.ids.every),
        schema,
    )


class EventTables:
    """What a recipe's ``build`` asks of a data set, for a log: two columns of raw ids.

    Args:
        vocab: rows of each column's table.
    """

    name = "events"
    dense = ()
    items = (ITEM,)

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self.vocab = vocab
        self.features = tuple(vocab)

    @property
    def popularity(self) -> Any:
        """Equal counts, because each batch says itself how likely its candidates are."""
        return torch.ones(self.vocab[ITEM]).numpy()


def export_ids(
    model: DistributedModelParallel,
    ids: DynamicIds,
    out: Path,
    details: Mapping[str, Any],
    renewal: Renewal,
) -> None:
    """Exports a model with the live items and the ids of both tables; unknown and evicted ids read row 0.

    Args:
        model: the model in training.
        ids: the ids of both tables.
        out: folder of the bundle.
        details: further entries of the manifest.
        renewal: what bundles have in common.
    """
    steps = []
    live = {}
    rows = {}
    for name in (USER, ITEM):
        live_ids, live_rows = ids.live_ids(name)
        # Ascending ids are their own index: neither the bundle nor its server sorts
        # them again.
        live[name], order = live_ids.sort()
        rows[name] = torch.cat([live_rows.new_zeros(1), live_rows[order]])
        vocabulary = Vocabulary(pa.array(live[name].numpy()))
        steps.append((Categorify(column=name), vocabulary))
    items = live[ITEM].numpy()
    users = live[USER].numpy()
    export(
        model,
        out,
        catalogue=Catalogue(ids=items, features=pa.table({ITEM: items})),
        users=NamedUsers(
            key=USER,
            ids=users,
            features=pa.table({USER: users}),
            unknown={USER: None},
        ),
        preprocessor=FittedPreprocessor(steps, {USER: "int64", ITEM: "int64"}),
        rows=rows,
        details=details,
        overwrite=True,
        renewal=renewal,
    )


class Publisher:
    """Publishes a bundle when it is time.

    Args:
        options: when, and how many to keep.
        folder: folder of the bundles.
        write: exports a bundle to a folder.

    Attributes:
        newest: folder of the newest bundle; None before the first one.
    """

    def __init__(
        self,
        options: StreamOptions,
        folder: Path,
        write: Callable[[Path], None],
    ) -> None:
        self._every_s = options.publish_s
        self._keep = options.keep
        self._folder = folder
        self._write = write
        self._due = time.monotonic() + self._every_s
        # Until then only a training that has caught up with the log is interrupted.
        self._training_until = 0.0
        self._run: Any = None
        self._step = -1
        self.newest: Path | None = None
        # A process that was killed may have left half a bundle.
        for hidden in folder.glob(".step-*.*"):
            remove_leftovers(folder / hidden.stem[1:])

    def after_step(self, run: TrainingRun) -> None:
        """Publishes the run's model if it is time, and training has had as long as the last publication took."""
        self._run = run
        if time.monotonic() >= self._training_until:
            self.if_due()

    def if_due(self) -> None:
        """Publishes the model of the last step if it is time; called between steps while there are no new events."""
        if self._every_s and time.monotonic() >= self._due and self._run is not None:
            self.publish(self._run)

    def publish(self, run: Any) -> None:
        """Publishes the run's model, unless that of this step is published."""
        begin = time.monotonic()
        self._due = begin + self._every_s
        if self._step == run.at.step or not min(run.loader.ids.live.values()):
            return
        self.newest = self._folder / f"step-{run.at.step:010}"
        # An export draws random numbers; those of training must not depend on when it is
        # published.
        devices = range(torch.cuda.device_count())
        with run.outside_pipeline(), torch.random.fork_rng(devices):
            self._write(self.newest)
        write_whole(self._folder / CURRENT, f"{self.newest.name}\n".encode())
        self._step = run.at.step
        self._prune()
        # While it is behind the log, training has at least half of the time, however
        # long a publication takes.
        end = time.monotonic()
        self._training_until = end + (end - begin)

    def _prune(self) -> None:
        # By time, because a resumed run may be behind the bundles of the killed one.
        folders = sorted(
            self._folder.glob("step-*"), key=lambda folder: folder.stat().st_mtime_ns
        )
        for folder in folders[: -self._keep]:
            # Without its manifest it is no bundle, even if the removal is interrupted.
            (folder / BUNDLE_MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)


class StreamCheckpoints(RunCheckpoints):
    """Checkpoints of a run without an end, which also publish it; see :class:`RunCheckpoints` for the arguments."""

    def __init__(self, *arguments: Any, publisher: Publisher, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._publisher = publisher

    def after_step(self, run: TrainingRun) -> None:
        """Saves and publishes if it is time."""
        super().after_step(run)
        self._publisher.after_step(run)

    def after_epoch(self, run: TrainingRun, *, last: bool, best: bool) -> None:
        """Saves and publishes at the end of the log as it is now."""
        # Tomorrow the log goes on, so this epoch has no end.
        run.at.ended = False
        self.save(run)
        self._publisher.publish(run)
