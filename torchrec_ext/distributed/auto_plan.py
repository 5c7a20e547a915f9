"""auto_plan(): measures on the ranks of this job, and chooses how towers and tables are placed; for ``plan.towers=auto``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.chooser import EVERYWHERE, Candidate, Decision, choose
from torchrec_ext.distributed.measure import measure
from torchrec_ext.distributed.measurements import Measurements
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.distributed.placement import PlacementError
from torchrec_ext.distributed.planning import PlanConfig, plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sample import Sample
from torchrec_ext.distributed.tower_planning import tower_placement
from torchrec_ext.distributed.trials import Trials

_SECONDS = 1.0  # of whole steps of each candidate that is tried


def auto_plan(
    model: nn.Module,
    batch: TowerBatch,
    runtime: Runtime,
    config: PlanConfig,
    optimizer: OptimizerConfig,
    *,
    everywhere: nn.Module | None = None,
    together: str = "",
) -> tuple[PlanConfig, Decision]:
    """The config with what was chosen in place of ``auto``, and why; every rank calls it and gets the same.

    Args:
        model: unsharded; it stays as it is.
        batch: one of this rank's batches.
        runtime: this process's place in the job.
        config: what is free in it is chosen: where towers run, and the sharding type where that is ``auto`` too.
        optimizer: of tables and dense layers.
        everywhere: the model as it is where all towers run on every rank, if that is another, such as with merged look-ups.
        together: why towers must run on every rank, if they must.

    Raises:
        PlanError: the tables do not fit in any way.
    """
    everywhere = model if everywhere is None else everywhere
    refused = together or why_together(model, runtime)

    def planned(one: Candidate, found: Measurements | None = None) -> str:
        """Why there is no plan for it, in one line, or nothing."""
        planned_for = everywhere if one.towers == EVERYWHERE else model
        asked = as_config(config, one)
        try:
            plan_sharding(planned_for, runtime, asked, optimizer=optimizer, batch_size=len(batch), measured=found)
        except ValueError as error:  # a PlanError, or an optimizer that runs under no such sharding
            return str(error).splitlines()[0]
        return ""

    # What does not fit on all ranks together fits on none of them: told before anything is measured.
    whole = dataclasses.replace(config, towers=EVERYWHERE)
    plan_sharding(everywhere, runtime, whole, optimizer=optimizer, batch_size=len(batch))
    kinds: list[str] = [config.sharding]
    if config.sharding == "auto" and not planned(Candidate(towers=EVERYWHERE, sharding="table_wise")):
        kinds = ["table_wise", "auto"]
    with torch.random.fork_rng(devices=[]), Trials(runtime, optimizer) as trials:
        flat, sample = Sample.of(everywhere, batch), None if refused else Sample.of(model, batch)
        found = measure(flat, sample, runtime, config, optimizer, kinds, trials)

        def try_out(some: Sequence[Candidate]) -> list[float | str]:
            """Milliseconds of a step of each, tried in turn, or why there is none."""
            told: list[float | str] = [""] * len(some)
            for place, one in enumerate(some):
                try:
                    if one.towers != EVERYWHERE:  # those are there already
                        trials.add(sample or flat, as_config(config, one), found)
                except ValueError as error:
                    told[place] = str(error).splitlines()[0]
            able = [place for place, reason in enumerate(told) if not reason]
            for place, ms in zip(able, trials.ms([as_config(config, some[place]) for place in able], _SECONDS), strict=True):
                told[place] = ms
            return told

        decision = choose(found, kinds[0], refused=refused, try_out=try_out, fits=lambda one: planned(one, found))
    return as_config(config, decision.taken), decision


def as_config(config: PlanConfig, candidate: Candidate) -> PlanConfig:
    """``config`` with what the candidate stands for."""
    return dataclasses.replace(config, towers=candidate.towers, sharding=candidate.sharding)  # type: ignore[arg-type]


def why_together(model: nn.Module, runtime: Runtime) -> str:
    """Why the towers of ``model`` cannot have ranks of their own, or nothing."""
    try:
        tower_placement(model, "tower_parallel", runtime.world_size)
    except PlacementError as error:
        return str(error).removeprefix("plan.towers=tower_parallel: ")
    return ""
