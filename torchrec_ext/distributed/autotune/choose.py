"""auto_plan(): tries placements of towers and tables on the ranks of this job, and takes the fastest.

It answers ``plan.towers=auto``. All candidates make whole steps of a sample of the model, in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations

import torch
from tabulate import tabulate
from torch import nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.sample import Sample
from torchrec_ext.distributed.autotune.trials import Steps, Trials, plain_steps
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import dense_layers
from torchrec_ext.distributed.placement import PlacementError, TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.plan.towers import find_towers, tower_placement
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import tables_of
from torchrec_ext.distributed.tower_parallel.lookups import sharing_groups
from torchrec_ext.modules.tower import Towers

EVERYWHERE = "data_parallel"
# Most placements that do not run all towers on every rank: on 2 to 4 ranks two towers
# have no more.
_MOST_PLACED = 5
# Seconds spent on whole steps of each candidate.
_TRIAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A placement of a model's towers and a sharding type of its tables, with the time of a step.

    Args:
        towers: placement as in ``PlanConfig.towers``: ``data_parallel``, or ranks for each tower.
        sharding: sharding type of all tables.
        trial_ms: ms of a step on a sample of the model; infinite before it was tried.
        refused: why the candidate is impossible; empty if it is possible.
    """

    towers: str
    sharding: str
    trial_ms: float = float("inf")
    refused: str = ""


def placements(loads: Mapping[str, float], world_size: int) -> list[TowerPlacement]:
    """Proposes placements: all towers apart, in proportion to ``loads`` and one rank next to it, and some towers apart.

    Args:
        loads: work of each tower for a row, in any unit.
        world_size: number of ranks.
    """
    everywhere = tuple(range(world_size))
    # By their text, since several ways may lead to one placement.
    proposed: dict[str, TowerPlacement] = {}
    for placement in _placements(loads, world_size):
        if set(placement.ranks.values()) != {everywhere}:
            proposed[str(placement)] = placement
    return list(proposed.values())[:_MOST_PLACED]


def _placements(
    loads: Mapping[str, float], world_size: int
) -> Iterator[TowerPlacement]:
    if world_size == 1 or not loads:
        return
    in_proportion = TowerPlacement.apart(loads, world_size)
    yield in_proportion
    counts = {name: len(ranks) for name, ranks in in_proportion.ranks.items()}
    # Loads are estimates, so the placements one rank next to the proportional one are
    # tried too.
    for more, fewer in permutations(loads, 2):
        if world_size >= len(loads) and counts[fewer] > 1:
            yield _in_order(
                {**counts, more: counts[more] + 1, fewer: counts[fewer] - 1}, world_size
            )
    everywhere = tuple(range(world_size))
    for size in range(len(loads) - 1, 0, -1):
        for names in combinations(loads, size):
            ranks = dict.fromkeys(loads, everywhere)
            if size == 1:
                # One tower alone gets the last half of the ranks, or it would be on
                # every rank too.
                ranks[names[0]] = everywhere[world_size // 2 :]
            else:
                ranks |= TowerPlacement.apart(
                    {name: loads[name] for name in names}, world_size
                ).ranks
            yield TowerPlacement(ranks=ranks, world_size=world_size)


def _in_order(counts: Mapping[str, int], world_size: int) -> TowerPlacement:
    free = iter(range(world_size))
    ranks = {name: tuple(islice(free, count)) for name, count in counts.items()}
    return TowerPlacement(ranks=ranks, world_size=world_size)


def tower_loads(model: nn.Module) -> dict[str, float]:
    """Returns the multiplications and pooled numbers of each tower for a row; towers that share tables are one."""
    _, towers = find_towers(model) or ("", Towers({}))
    loads: dict[str, float] = {}
    for unit in sharing_groups(dict(towers.items())):
        load = 0
        for name in unit:
            tower = towers[name]
            load += sum(tower.get_parameter(key).numel() for key in dense_layers(tower))
            load += sum(
                table.embedding_dim * table.num_features() for table in tables_of(tower)
            )
        loads["+".join(unit)] = load
    return loads


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The candidates of :func:`auto_plan`, fastest first and impossible ones last; the first is taken."""

    candidates: Sequence[Candidate]

    @property
    def taken(self) -> Candidate:
        """Fastest candidate that there is a plan for."""
        return self.candidates[0]

    def text(self, measured_ms: float | None = None) -> str:
        """Formats the candidates as a table, and says what the first one saves against the other kind.

        Args:
            measured_ms: ms of a step of the training, for a column next to the trials; None before training.
        """
        rows = []
        for candidate in self.candidates:
            row = {
                "towers": candidate.towers,
                "tables": candidate.sharding,
                "tried ms": "",
            }
            note = candidate.refused
            if not candidate.refused:
                row["tried ms"] = f"{candidate.trial_ms:.2f}"
            if measured_ms is not None:
                row["measured ms"] = ""
            if candidate is self.taken:
                note = "taken"
                if measured_ms is not None:
                    row["measured ms"] = f"{measured_ms:.2f}"
            rows.append({**row, "": note})
        table = str(tabulate(rows, headers="keys", disable_numparse=True))
        best = self.taken
        against = ""
        # Candidates are in order, so the first of the other kind is its fastest.
        for other in self.candidates:
            if not other.refused and (other.towers == EVERYWHERE) != (
                best.towers == EVERYWHERE
            ):
                against = (
                    f", against {other.trial_ms:.2f} ms with towers={other.towers}"
                )
                break
        return f"{table}\ntowers={best.towers}, tables {best.sharding}: {best.trial_ms:.2f} ms a step{against}"


def decide(candidates: Sequence[Candidate]) -> Decision:
    """Takes the fastest of the candidates.

    Raises:
        PlanError: all are refused; the message is that of the first one.
    """
    ordered = sorted(
        candidates, key=lambda candidate: (bool(candidate.refused), candidate.trial_ms)
    )
    if ordered[0].refused:
        raise PlanError(candidates[0].refused)
    return Decision(candidates=ordered)


def auto_plan(
    model: nn.Module,
    batch: TowerBatch,
    runtime: Runtime,
    config: PlanConfig,
    optimizer: OptimizerConfig,
    *,
    everywhere: nn.Module | None = None,
    together: str = "",
    more: Sequence[TowerBatch] = (),
    steps: Steps = plain_steps,
) -> tuple[PlanConfig, Decision]:
    """Tries candidates; returns the config with the chosen placement instead of ``auto``, and the decision. Collective.

    Args:
        model: unsharded model; it is not changed.
        batch: one of this rank's batches.
        runtime: this process's rank and device.
        config: config whose free settings are chosen: where towers run, and the sharding type if it is ``auto``.
        optimizer: optimizers of tables and dense layers.
        everywhere: model to use if all towers run on every rank, such as one with merged look-ups; ``model`` by
            default.
        together: why towers must run on every rank; empty if they need not.
        more: further batches of this rank, as many on every rank; the trials train on them in turn.
        steps: makes what runs the steps of a trial: for a training by :func:`train`, its ``checked_steps``; TorchRec's
            pipeline without checks by default.

    Raises:
        PlanError: the tables fit under no placement.
    """
    if everywhere is None:
        everywhere = model
    why_apart_is_refused = together or why_together(model, runtime)

    # Tables that do not fit on all ranks together fit under no placement: refused
    # before anything is tried.
    flat = dataclasses.replace(config, towers=EVERYWHERE)
    plan_sharding(everywhere, runtime, flat, optimizer=optimizer, batch_size=len(batch))
    # TorchRec's planner guesses the speed of the network, so its choice is tried next
    # to the two extremes.
    kinds: list[str] = [config.sharding]
    if config.sharding == "auto":
        kinds = ["table_wise", "auto", "data_parallel"]
    candidates = [Candidate(towers=EVERYWHERE, sharding=kind) for kind in kinds]
    if not why_apart_is_refused:
        for placement in placements(tower_loads(model), runtime.world_size):
            candidates.append(Candidate(towers=str(placement), sharding=kinds[0]))
    plans: set[str] = set()
    # Candidates with one plan would only be measured twice.
    distinct: list[Candidate] = []
    refused: list[Candidate] = []
    # Trials draw random numbers, and the training after them must draw what it would
    # have drawn without them.
    with torch.random.fork_rng(devices=[]), Trials(runtime, optimizer, steps) as trials:
        samples = {True: Sample.of(everywhere, batch, more)}
        if not why_apart_is_refused:
            samples[False] = Sample.of(model, batch, more)
        for candidate in candidates:
            is_flat = candidate.towers == EVERYWHERE
            candidate_config = as_config(config, candidate)
            whole_model = model
            if is_flat:
                whole_model = everywhere
            try:
                plan = plan_sharding(
                    whole_model,
                    runtime,
                    candidate_config,
                    optimizer=optimizer,
                    batch_size=len(batch),
                )
                # TorchRec's planner may choose a plan that is there already.
                if str(plan) not in plans:
                    plans.add(str(plan))
                    trials.add(samples[is_flat], candidate_config)
                    distinct.append(candidate)
            except ValueError as error:
                # This is a PlanError, or an optimizer that runs under no such sharding.
                refused.append(
                    dataclasses.replace(candidate, refused=str(error).splitlines()[0])
                )
        # All samples are there before the first is timed: their steps take turns.
        times = trials.ms(
            [as_config(config, candidate) for candidate in distinct], _TRIAL_S
        )
    if why_apart_is_refused:
        refused.append(
            Candidate(
                towers="tower_parallel", sharding=kinds[0], refused=why_apart_is_refused
            )
        )
    timed = []
    for candidate, ms in zip(distinct, times, strict=True):
        timed.append(dataclasses.replace(candidate, trial_ms=ms))
    decision = decide([*timed, *refused])
    return as_config(config, decision.taken), decision


def as_config(config: PlanConfig, candidate: Candidate) -> PlanConfig:
    """Returns ``config`` with the placement and sharding type of a candidate."""
    return dataclasses.replace(
        config,
        towers=candidate.towers,
        sharding=candidate.sharding,  # type: ignore[arg-type]
    )


def why_together(model: nn.Module, runtime: Runtime) -> str:
    """Returns why the towers of ``model`` cannot have ranks of their own; empty if they can."""
    try:
        tower_placement(model, "tower_parallel", runtime.world_size)
    except PlacementError as error:
        return str(error).removeprefix("plan.towers=tower_parallel: ")
    return ""
