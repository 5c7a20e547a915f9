"""Plans tables for devices that need not exist: prints memory and time of each rank, or what would make a plan fit.

In a folder a plan leaves its text, its numbers as JSON, and a picture of what each rank holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.cluster import (
    Alternative,
    RankForecast,
    alternatives_text,
    compare,
    forecast,
    forecast_text,
    kernel_fits,
    kernel_fits_text,
    memory_by_table,
    memory_text,
)
from torchrec_ext.distributed.plan.config import CACHING, Kernel, PlanConfig, Sharding
from torchrec_ext.distributed.plan.devices import GB, Cluster
from torchrec_ext.distributed.plan.draft import Draft, PlanError, draft_plan
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import free_tables
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.drawing.figures import (
    BLUE,
    RED,
    figure_with_panels,
    require_matplotlib,
    save_figure,
)
from torchx_apps.cli.command_line import write_out
from torchx_apps.cli.plan_flags import (
    batch_size_of,
    cluster_of,
    parse_tables,
    with_flags,
)
from torchx_apps.tasks.job import Job

_COLOURS = {"weights": BLUE, "state": RED, "buffers": "#6a994e", "dense": "#7b5ea7"}


def as_json(
    batch_size: int,
    cluster: Cluster,
    draft: Draft,
    ranks: Sequence[RankForecast],
    alternatives: Sequence[Alternative],
) -> dict[str, Any]:
    """Returns the plan as JSON values, in bytes and milliseconds."""
    memory = memory_by_table(draft)
    tables = []
    for option in draft.options:
        hbm, ddr, ssd = dataclasses.astuple(memory[option.name])
        table = {
            "name": option.name,
            "rows": option.tensor.shape[0],
            "dim": option.tensor.shape[1],
            "sharding": option.sharding_type,
            "kernel": option.compute_kernel,
            "ranks": [shard.rank for shard in option.shards],
        }
        tables.append({**table, "hbm": hbm, "ddr": ddr, "ssd": ssd})
    others = []
    for other in alternatives:
        # JSON has no infinity, the time of a plan that does not fit.
        ms = None if math.isinf(other.ms) else other.ms
        others.append({**dataclasses.asdict(other), "ms": ms})
    return {
        "cluster": dataclasses.asdict(cluster),
        "batch_size": batch_size,
        "tables": tables,
        "ranks": [
            {**dataclasses.asdict(rank), "total": rank.total, "ms": rank.ms}
            for rank in ranks
        ],
        "alternatives": others,
    }


def draw_plan(path: Path, ranks: Sequence[RankForecast], cluster: Cluster) -> None:
    """Draws each rank's used and available memory on the left, and the time of its tables on the right."""
    require_matplotlib("leave out --out")
    figure, (memory, time) = figure_with_panels(2, (11, 3.8), grid="y")
    numbers = [rank.rank for rank in ranks]
    # Gaps between more than 32 bars would be too narrow to see.
    width = 1.0 if len(ranks) > 32 else 0.8
    floor = np.zeros(len(ranks))
    for kind, colour in _COLOURS.items():
        heights = np.array([getattr(rank, kind) for rank in ranks]) / GB
        memory.bar(
            numbers, heights, bottom=floor, width=width, color=colour, label=kind
        )
        floor = floor + heights
    has = (cluster.device_bytes or cluster.host_bytes) / GB
    # Otherwise the bars would be too low to see.
    if floor.max() > 0.1 * has:
        memory.axhline(has, linestyle="--", color="0.3", label="has")
    memory.set(
        title=f"memory by rank; each has {has:,.1f} GiB", xlabel="rank", ylabel="GiB"
    )
    memory.legend(frameon=False, fontsize="small")
    lookups = [rank.lookup_ms for rank in ranks]
    time.bar(numbers, lookups, color=BLUE, label="look-up")
    time.bar(
        numbers,
        [rank.exchange_ms for rank in ranks],
        bottom=lookups,
        color=RED,
        label="exchange",
    )
    time.set(title="tables' part of a step, foreseen", xlabel="rank", ylabel="ms")
    time.legend(frameon=False, fontsize="small")
    save_figure(figure, path)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model to plan, with the devices to plan it for.

    Args:
        model: model whose tables are on the meta device.
        bag_lengths: mean number of ids of a row, by feature, where they are known.
        batch_size: rows of a rank and step.
        plan: allowed sharding types.
        optimizer: optimizers of tables and dense layers.
        cluster: the devices.
        sync: what ranks exchange in the training that is planned, and how often.
    """

    model: nn.Module
    bag_lengths: Mapping[str, float]
    batch_size: int
    plan: PlanConfig
    optimizer: OptimizerConfig
    cluster: Cluster
    sync: SyncConfig

    def free_tables(
        self, plan: PlanConfig
    ) -> tuple[Mapping[str, ParameterConstraints], str]:
        """Returns the constraints of a training on these devices for the free tables of ``plan``, and the reason."""
        runtime = Runtime(
            world_size=self.cluster.world_size,
            local_world_size=self.cluster.local_world_size,
            device=torch.device(self.cluster.device),
        )
        return free_tables(self.model, runtime, plan, self.optimizer, self.sync)

    def draft(
        self, plan: PlanConfig, cluster: Cluster | None = None
    ) -> tuple[Draft, list[RankForecast]]:
        """Returns TorchRec's plan and its forecast per rank, for ``cluster`` if given.

        Raises:
            PlanError: no plan fits.
        """
        cluster = cluster or self.cluster
        draft = draft_plan(
            self.model,
            cluster.topology(),
            plan,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            bag_lengths=self.bag_lengths,
            constraints=self.free_tables(plan)[0],
        )
        return draft, forecast(draft, self.model, cluster, self.optimizer)


def run_plan(options: argparse.Namespace, job: Job | None) -> int:
    """Prints the plan for the flags, and writes it to ``--out``.

    Returns:
        0.

    Raises:
        PlanError: no plan fits; the message says what would make it fit, and which sharding types do.
    """
    cluster = cluster_of(options)
    request = (
        _request_of_tables(options, cluster)
        if job is None
        else _request_of_recipe(options, job, cluster)
    )

    def predict(sharding: Sharding) -> list[RankForecast]:
        return request.draft(dataclasses.replace(request.plan, sharding=sharding))[1]

    def predict_kernel(kernel: Kernel, devices: int) -> list[RankForecast]:
        factor = request.plan.cache_load_factor if kernel in CACHING else 0.0
        plan = dataclasses.replace(
            request.plan, kernel=kernel, cache_load_factor=factor, tables=()
        )
        return request.draft(plan, dataclasses.replace(cluster, world_size=devices))[1]

    try:
        draft, ranks = request.draft(request.plan)
    except PlanError as error:
        parts = [str(error)]
        # The other kernels are those of a GPU.
        if cluster.device == "cuda":
            parts.append(
                kernel_fits_text(kernel_fits(predict_kernel, cluster), cluster)
            )
        others = alternatives_text(compare(predict, {}), request.plan.sharding)
        flags = "--world-size, --hbm and --ddr say what there is; --sharding and --optimizer what is asked of it"
        parts.append(f"{others}\n{flags}")
        raise PlanError("\n\n".join(filter(None, parts))) from None
    alternatives = compare(predict, {request.plan.sharding: ranks})
    _, whole = request.free_tables(request.plan)
    explained = explain(draft.plan, request.model, cluster.world_size)
    if whole:
        explained += f"\n{whole}"
    parts = [explained]
    if cluster.device == "cuda":
        parts.append(memory_text(draft))
    parts.append(forecast_text(ranks, cluster))
    # Replicated small tables do not rest on the forecasts, so these advise nothing.
    parts.append(
        alternatives_text(alternatives, request.plan.sharding, advise=not whole)
    )
    text = "\n\n".join(parts)
    report = as_json(request.batch_size, cluster, draft, ranks, alternatives)
    print(json.dumps(report) if options.json else text, flush=True)
    if options.out:
        write_out(
            options.out, {"plan.txt": text, "plan.json": json.dumps(report, indent=2)}
        )
        draw_plan(options.out / "memory.png", ranks, cluster)
    return 0


def _request_of_tables(options: argparse.Namespace, cluster: Cluster) -> PlanRequest:
    configs = []
    bag_lengths = {}
    for name, rows, dim, ids in parse_tables(options.tables):
        configs.append(
            EmbeddingBagConfig(
                name=name, feature_names=[name], num_embeddings=rows, embedding_dim=dim
            )
        )
        bag_lengths[name] = ids
    return PlanRequest(
        model=nn.ModuleDict(
            {
                "tables": EmbeddingBagCollection(
                    tables=configs, device=torch.device("meta")
                )
            }
        ),
        bag_lengths=bag_lengths,
        batch_size=batch_size_of(options.batch_size or 1024),
        plan=with_flags(PlanConfig(), options),
        optimizer=OptimizerConfig(tables=options.optimizer or "row_wise_adagrad"),
        cluster=cluster,
        sync=SyncConfig(),
    )


def _request_of_recipe(
    options: argparse.Namespace, job: Job, cluster: Cluster
) -> PlanRequest:
    """Returns a request for the tables of a recipe, sized by its data, which must exist."""
    # Imported here: the training loop, which comes with it, takes half a second that
    # other plans need not wait.
    from torchx_apps.jobs.setup import data_for_build, merge_lookups

    task = job.task(job.data, progress=True)
    rows = job.loader.rank_rows(cluster.world_size)
    optimizer = job.optimizer
    if options.optimizer:
        optimizer = dataclasses.replace(optimizer, tables=options.optimizer)
    model: Any = job.build(job.model, data_for_build(job, task))
    merge_lookups(job, model, cluster.world_size)
    return PlanRequest(
        model=model,
        bag_lengths={},
        batch_size=batch_size_of(options.batch_size or rows),
        plan=with_flags(job.plan, options),
        optimizer=optimizer,
        cluster=cluster,
        sync=job.sync,
    )
