"""auto_plan(): measures on the ranks of this job, and chooses how towers and tables are placed; for ``plan.towers=auto``.

choose(): towers on every rank, apart or mixed, and their tables how: by measurements on the ranks of this job.

A cost model foresees each candidate's step from :class:`Measurements`; the best that do not run the towers on every
rank are then tried, in turn with those that do, and the fastest is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import torch
from tabulate import tabulate
from torch import nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.measure import measure
from torchrec_ext.distributed.autotune.sample import Sample
from torchrec_ext.distributed.autotune.trials import Trials
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.placement import PlacementError, TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.measurements import Measurements, TowerCost
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.plan.towers import tower_placement
from torchrec_ext.distributed.runtime import Runtime

EVERYWHERE = "data_parallel"
_MOST = 40  # placements that are looked at
_HOPELESS = 1.5  # times the best step so far: what the cost model foresees to be slower is not tried


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The parts of a step, ms.

    Args:
        besides: what a step takes besides towers, tables and the exchange of the towers' gradients.
        towers: of the busiest rank.
        within: exchanges between the ranks of one tower, for its tables and gradients.
        between: rows to the towers' ranks, outputs back, and their gradients.
    """

    besides: float
    towers: float
    within: float
    between: float

    @property
    def total(self) -> float:
        """The step."""
        return self.besides + self.towers + self.within + self.between


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the towers of a model.

    Args:
        towers: as in ``PlanConfig.towers``: ``data_parallel``, or ranks for each.
        sharding: of all tables.
        parts: of a step, by the cost model; None where it was not asked, because towers run on every rank.
        trial_ms: of a step on a sample of the model; None where it was not tried.
        refused: why it cannot be; empty where it can.
    """

    towers: str
    sharding: str
    parts: PredictedStep | None = None
    trial_ms: float | None = None
    refused: str = ""

    @property
    def ms(self) -> float:
        """The foreseen step."""
        if self.refused:
            return float("inf")
        found = self.model_ms if self.trial_ms is None else self.trial_ms
        return float("inf") if found is None else found

    @property
    def model_ms(self) -> float | None:
        """By the cost model."""
        return None if self.parts is None else self.parts.total


def placements(costs: Mapping[str, TowerCost], world_size: int) -> list[TowerPlacement]:
    """Towers apart, with ranks in proportion to what they cost and with one more or fewer, and some on every rank, others apart."""
    loads = {name: _of_tower(cost, cost.rows * world_size) for name, cost in costs.items()}
    found: dict[str, TowerPlacement] = {}
    for placement in islice(_placements(loads, world_size), _MOST):
        found.setdefault(str(placement), placement)
    everywhere = tuple(range(world_size))
    return [one for one in found.values() if any(ranks != everywhere for ranks in one.ranks.values())]


def _placements(loads: Mapping[str, float], world_size: int) -> Iterator[TowerPlacement]:
    if world_size == 1 or not loads:
        return
    yield TowerPlacement.apart(loads, world_size)
    for more, fewer in ((more, fewer) for more in loads for fewer in loads if more != fewer):
        counts = {name: len(ranks) for name, ranks in TowerPlacement.apart(loads, world_size).ranks.items()}
        if world_size >= len(loads) and counts[fewer] > 1:
            yield _in_order({**counts, more: counts[more] + 1, fewer: counts[fewer] - 1}, world_size)
    for size in range(len(loads) - 1, 0, -1):
        for apart in combinations(loads, size):
            ranks = TowerPlacement.apart({name: loads[name] for name in apart}, world_size).ranks
            if size == 1:  # alone on the last half, or it would be on every rank too
                ranks = {apart[0]: tuple(range(world_size // 2, world_size))}
            everywhere = tuple(range(world_size))
            yield TowerPlacement(ranks={name: ranks.get(name, everywhere) for name in loads}, world_size=world_size)


def _in_order(counts: Mapping[str, int], world_size: int) -> TowerPlacement:
    free = iter(range(world_size))
    return TowerPlacement(
        ranks={name: tuple(islice(free, count)) for name, count in counts.items()}, world_size=world_size
    )


def predict_step(placement: TowerPlacement, found: Measurements) -> PredictedStep:
    """A step with the towers where ``placement`` puts them."""
    return PredictedStep(
        besides=_besides(found),
        towers=max(_on_rank(placement, found, rank) for rank in range(found.world_size)),
        within=_within(placement, found),
        between=_between(placement, found),
    )


def single_process_ms(found: Measurements) -> float:
    """About how many ms one process would take for the rows of all."""
    towers = sum(_of_tower(cost, cost.rows * found.world_size) for cost in found.towers.values())
    return _besides(found) * found.world_size + towers


def _besides(found: Measurements) -> float:
    """The measured step less its towers, its look-ups, and the exchange of the towers' gradients."""
    own = sum(cost.dense.at(cost.rows) + cost.optimizer for cost in found.towers.values())
    gradients = found.all_reduce.each * sum(cost.dense_bytes for cost in found.towers.values())
    return max(next(iter(found.steps.values())) - found.looked_up - own - gradients, 0.0)


def _of_tower(cost: TowerCost, rows: float) -> float:
    return cost.dense.at(rows) + cost.look_up.at(rows) + cost.optimizer


def _on_rank(placement: TowerPlacement, found: Measurements, rank: int) -> float:
    return sum(
        _of_tower(cost, cost.rows * found.world_size / len(placement.ranks[name]))
        for name, cost in found.towers.items()
        if rank in placement.ranks[name]
    )


def _within(placement: TowerPlacement, found: Measurements) -> float:
    """Of the rank that has most; towers on other ranks exchange at the same time."""
    spent = [0.0] * found.world_size
    for name, cost in found.towers.items():
        size = len(placement.ranks[name])
        if size > 1:
            rows = cost.rows * found.world_size / size * (size - 1) / size
            tables = 3 * found.all_to_all.fixed + found.all_to_all.each * rows * (
                cost.row_bytes + 2 * cost.pooled_bytes
            )
            for rank in placement.ranks[name]:
                spent[rank] += tables + found.all_reduce.at(cost.dense_bytes)
    return max(spent)


def _between(placement: TowerPlacement, found: Measurements) -> float:
    """As much as the rank sends or gets that does most: a header, the rows, the outputs, and these rows' gradients."""
    there, back = [0.0] * found.world_size, [0.0] * found.world_size
    for name, cost in found.towers.items():
        ranks = placement.ranks[name]
        for rank in range(found.world_size):
            rows = cost.rows * (found.world_size - len(ranks)) / len(ranks) if rank in ranks else cost.rows
            there[rank] += rows * cost.row_bytes
            back[rank] += rows * cost.out_bytes
    line = found.all_to_all
    return 4 * line.fixed + line.each * (max(there) + 2 * max(back))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was chosen, among what.

    Args:
        candidates: the fastest first, those that cannot be at the end.
        measurements: the measurements.
    """

    candidates: Sequence[Candidate]
    measurements: Measurements

    @property
    def taken(self) -> Candidate:
        """The fastest that there is a plan for."""
        return self.candidates[0]

    def text(self, measured_ms: float | None = None) -> str:
        """The candidates as a table, and why the first was taken; after training with the step that was measured beside it."""
        rows = []
        for one in self.candidates:
            ms = ["" if value is None else f"{value:.2f}" for value in (one.model_ms, one.trial_ms)]
            own = [] if measured_ms is None else [f"{measured_ms:.2f}" if one is self.taken else ""]
            rows.append([one.towers, one.sharding, *ms, *own, one.refused or ("taken" if one is self.taken else "")])
        headers = ["towers", "tables", "foreseen ms", "tried ms", *([] if measured_ms is None else ["measured ms"]), ""]
        table = str(tabulate(rows, headers=headers, disable_numparse=True))
        return f"{table}\n{self._why()}"

    def _why(self) -> str:
        """What the first saves against the best of the other kind."""
        taken, found = self.taken, self.measurements
        other = next(
            (
                one
                for one in self.candidates[1:]
                if not one.refused and (one.towers == EVERYWHERE) != (taken.towers == EVERYWHERE)
            ),
            None,
        )
        beside = "" if other is None else f", against {other.ms:.2f} ms with towers={other.towers}"
        lines = [f"towers={taken.towers}, tables {taken.sharding}: {taken.ms:.2f} ms a step{beside}"]
        apart = next((one for one in self.candidates if one.parts is not None and not one.refused), None)
        if apart is not None and apart.parts is not None:
            parts = apart.parts
            lines.append(
                f"of towers={apart.towers} the busiest rank's towers take {parts.towers:.2f} ms, exchanges between "
                f"towers {parts.between:.2f} and within them {parts.within:.2f}, all else {parts.besides:.2f}; with "
                f"towers on every rank {found.dense_bytes / 1e6:.1f} MB of gradients are averaged in each step"
            )
        if found.towers:
            lines.append(f"one process alone would take about {single_process_ms(found):.2f} ms for these rows")
        return "\n".join(lines)


def choose(
    found: Measurements,
    sharding: str,
    *,
    refused: str = "",
    try_out: Callable[[Sequence[Candidate]], Sequence[float | str]],
    fits: Callable[[Candidate], str],
    tried: int = 2,
) -> Decision:
    """Every rank calls it with the same figures, and gets the same decision.

    Args:
        found: on these ranks.
        sharding: of the tables of towers that are placed apart.
        refused: why towers cannot be placed; nothing where they can.
        try_out: ms of a step of each of some candidates on a sample of the model; why there is none in its place.
        fits: why there is no plan for a candidate with the whole model, or nothing.
        tried: how many of the placements that the cost model foresees to be fastest are tried.

    Raises:
        PlanError: there is no plan for any of them; the message is that of the one that would be fastest.
    """
    candidates = [Candidate(towers=EVERYWHERE, sharding=kind, trial_ms=ms) for kind, ms in found.steps.items()]
    parts = {str(one): predict_step(one, found) for one in placements(found.towers, found.world_size)}
    placed = [
        Candidate(towers=text, sharding=sharding, parts=parts[text])
        for text in sorted(parts, key=lambda one: parts[one].total)
    ]
    hopeful = [one for one in placed[:tried] if one.ms < _HOPELESS * min(found.steps.values())]
    candidates += hopeful
    candidates = [_tried(one, told) for one, told in zip(candidates, try_out(candidates), strict=True)]
    candidates += placed[len(hopeful) :]
    if refused:
        candidates.append(Candidate(towers="tower_parallel", sharding=sharding, refused=refused))
    candidates.sort(key=_order)
    for place, one in enumerate(candidates):
        reason = one.refused or fits(one)
        if not reason:
            break
        candidates[place] = dataclasses.replace(one, refused=reason)
    else:
        raise PlanError(candidates[0].refused)
    return Decision(candidates=sorted(candidates, key=_order), measurements=found)


def _tried(one: Candidate, told: float | str) -> Candidate:
    """With the ms of a step, or why there is no such step."""
    return dataclasses.replace(one, refused=told) if isinstance(told, str) else dataclasses.replace(one, trial_ms=told)


def _order(one: Candidate) -> tuple[bool, bool, float]:
    """By speed, but what was only foreseen after what was tried."""
    return bool(one.refused), one.trial_ms is None, one.ms


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
        everywhere: the model as it is where all towers run on every rank, if that is another, such as with merged
            look-ups.
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
            for place, ms in zip(
                able, trials.ms([as_config(config, some[place]) for place in able], _SECONDS), strict=True
            ):
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
