"""auto_plan(): chooses the placement of towers and tables by measurements on the ranks of this job.

It answers ``plan.towers=auto``. choose() compares towers on every rank, apart or mixed, and sharding types: a cost
model predicts each candidate's step from :class:`Measurements`; the best placements that do not run all towers on every
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
from torchrec_ext.distributed.autotune.trials import Steps, Trials, plain_steps
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.placement import PlacementError, TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.measurements import Measurements, TowerCost
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.plan.towers import tower_placement
from torchrec_ext.distributed.runtime import Runtime

EVERYWHERE = "data_parallel"
_MOST = 40  # placements that are considered
_HOPELESS = 1.5  # times the best step so far: a placement that the cost model predicts to be slower is not tried


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Predicted time of a step, in ms.

    Args:
        besides: ms of everything besides towers, tables and the exchange of the towers' gradients.
        towers: ms of the towers on the busiest rank.
        within: ms of exchanges between the ranks of one tower, for its tables and gradients.
        between: ms of sending rows to the towers' ranks, outputs back, and their gradients.
    """

    besides: float
    towers: float
    within: float
    between: float

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.besides + self.towers + self.within + self.between


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A placement of a model's towers and a sharding type of its tables, with predicted and tried times.

    Args:
        towers: placement as in ``PlanConfig.towers``: ``data_parallel``, or ranks for each tower.
        sharding: sharding type of all tables.
        predicted: step predicted by the cost model; None where towers run on every rank and it was not asked.
        trial_ms: ms of a step on a sample of the model; None where it was not tried.
        refused: why the candidate is impossible; empty where it is not.
    """

    towers: str
    sharding: str
    predicted: PredictedStep | None = None
    trial_ms: float | None = None
    refused: str = ""

    @property
    def ms(self) -> float:
        """Milliseconds of a step: tried where it was, else predicted; infinite where refused."""
        if self.refused:
            return float("inf")
        ms = self.model_ms if self.trial_ms is None else self.trial_ms
        return float("inf") if ms is None else ms

    @property
    def model_ms(self) -> float | None:
        """Milliseconds of a step by the cost model; None where it was not asked."""
        return None if self.predicted is None else self.predicted.total


def placements(costs: Mapping[str, TowerCost], world_size: int) -> list[TowerPlacement]:
    """Proposes placements: all towers apart, in proportion to cost and one rank beside it, and some towers apart."""
    loads = {name: _tower_ms(cost, cost.rows * world_size) for name, cost in costs.items()}
    proposed: dict[str, TowerPlacement] = {}
    for placement in islice(_placements(loads, world_size), _MOST):
        proposed.setdefault(str(placement), placement)
    everywhere = tuple(range(world_size))
    return [placement for placement in proposed.values() if any(r != everywhere for r in placement.ranks.values())]


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
            if size == 1:  # on the last half of the ranks, or it would be on every rank too
                ranks = {apart[0]: tuple(range(world_size // 2, world_size))}
            everywhere = tuple(range(world_size))
            yield TowerPlacement(ranks={name: ranks.get(name, everywhere) for name in loads}, world_size=world_size)


def _in_order(counts: Mapping[str, int], world_size: int) -> TowerPlacement:
    free = iter(range(world_size))
    return TowerPlacement(
        ranks={name: tuple(islice(free, count)) for name, count in counts.items()}, world_size=world_size
    )


def predict_step(placement: TowerPlacement, measured: Measurements) -> PredictedStep:
    """Predicts the step of a placement of towers from measurements."""
    return PredictedStep(
        besides=_besides_ms(measured),
        towers=max(_rank_ms(placement, measured, rank) for rank in range(measured.world_size)),
        within=_within_ms(placement, measured),
        between=_between_ms(placement, measured),
    )


def single_process_ms(measured: Measurements) -> float:
    """Estimates the ms of a step that one process would take for the rows of all ranks."""
    towers = sum(_tower_ms(cost, cost.rows * measured.world_size) for cost in measured.towers.values())
    return _besides_ms(measured) * measured.world_size + towers


def _besides_ms(measured: Measurements) -> float:
    """Returns the measured step without its towers, its look-ups and the exchange of the towers' gradients."""
    towers = sum(cost.dense.at(cost.rows) + cost.optimizer for cost in measured.towers.values())
    gradients = measured.all_reduce.each * sum(cost.dense_bytes for cost in measured.towers.values())
    return max(next(iter(measured.steps.values())) - measured.looked_up - towers - gradients, 0.0)


def _tower_ms(cost: TowerCost, rows: float) -> float:
    return cost.dense.at(rows) + cost.look_up.at(rows) + cost.optimizer


def _rank_ms(placement: TowerPlacement, measured: Measurements, rank: int) -> float:
    return sum(
        _tower_ms(cost, cost.rows * measured.world_size / len(placement.ranks[name]))
        for name, cost in measured.towers.items()
        if rank in placement.ranks[name]
    )


def _within_ms(placement: TowerPlacement, measured: Measurements) -> float:
    """Predicts exchanges within towers on the busiest rank; towers on other ranks exchange at the same time."""
    spent = [0.0] * measured.world_size
    line = measured.all_to_all
    for name, cost in measured.towers.items():
        size = len(placement.ranks[name])
        if size > 1:
            rows = cost.rows * measured.world_size / size * (size - 1) / size
            tables = 3 * line.fixed + line.each * rows * (cost.row_bytes + 2 * cost.pooled_bytes)
            for rank in placement.ranks[name]:
                spent[rank] += tables + measured.all_reduce.at(cost.dense_bytes)
    return max(spent)


def _between_ms(placement: TowerPlacement, measured: Measurements) -> float:
    """Predicts the exchanges of the busiest rank: a header, the rows, the outputs, and the outputs' gradients."""
    rows_sent, outputs_sent = [0.0] * measured.world_size, [0.0] * measured.world_size
    for name, cost in measured.towers.items():
        ranks = placement.ranks[name]
        for rank in range(measured.world_size):
            rows = cost.rows * (measured.world_size - len(ranks)) / len(ranks) if rank in ranks else cost.rows
            rows_sent[rank] += rows * cost.row_bytes
            outputs_sent[rank] += rows * cost.out_bytes
    line = measured.all_to_all
    return 4 * line.fixed + line.each * (max(rows_sent) + 2 * max(outputs_sent))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The candidates of :func:`auto_plan`, the first of which is taken.

    Args:
        candidates: candidates, fastest first, impossible ones last.
        measurements: measurements of the ranks, from which steps were predicted.
    """

    candidates: Sequence[Candidate]
    measurements: Measurements

    @property
    def taken(self) -> Candidate:
        """Fastest candidate that there is a plan for."""
        return self.candidates[0]

    def text(self, measured_ms: float | None = None) -> str:
        """Formats the candidates as a table, and says why the first was taken.

        Args:
            measured_ms: ms of a step of the training, for a column beside the predictions; None before training.
        """
        rows = []
        for candidate in self.candidates:
            is_taken = candidate is self.taken
            row = [candidate.towers, candidate.sharding]
            row += ["" if ms is None else f"{ms:.2f}" for ms in (candidate.model_ms, candidate.trial_ms)]
            if measured_ms is not None:
                row.append(f"{measured_ms:.2f}" if is_taken else "")
            rows.append([*row, candidate.refused or ("taken" if is_taken else "")])
        headers = ["towers", "tables", "foreseen ms", "tried ms", *([] if measured_ms is None else ["measured ms"]), ""]
        table = str(tabulate(rows, headers=headers, disable_numparse=True))
        return f"{table}\n{self._why()}"

    def _why(self) -> str:
        """Says what the first candidate saves against the best of the other kind."""
        taken, measured = self.taken, self.measurements
        possible = [candidate for candidate in self.candidates if not candidate.refused]
        others = [other for other in possible if (other.towers == EVERYWHERE) != (taken.towers == EVERYWHERE)]
        against = f", against {others[0].ms:.2f} ms with towers={others[0].towers}" if others else ""
        lines = [f"towers={taken.towers}, tables {taken.sharding}: {taken.ms:.2f} ms a step{against}"]
        apart = next((candidate for candidate in possible if candidate.predicted is not None), None)
        if apart is not None and apart.predicted is not None:
            step = apart.predicted
            lines.append(
                f"of towers={apart.towers} the busiest rank's towers take {step.towers:.2f} ms, exchanges between "
                f"towers {step.between:.2f} and within them {step.within:.2f}, all else {step.besides:.2f}; with "
                f"towers on every rank {measured.dense_bytes / 1e6:.1f} MB of gradients are averaged in each step"
            )
        if measured.towers:
            lines.append(f"one process alone would take about {single_process_ms(measured):.2f} ms for these rows")
        return "\n".join(lines)


def choose(
    measured: Measurements,
    sharding: str,
    *,
    refused: str = "",
    try_out: Callable[[Sequence[Candidate]], Sequence[float | str]],
    fits: Callable[[Candidate], str],
    tried: int = 2,
) -> Decision:
    """Chooses among candidates; ranks that call it with the same figures get the same decision.

    Args:
        measured: measurements of these ranks.
        sharding: sharding type of the tables of towers that are placed apart.
        refused: why towers cannot be placed apart; empty where they can.
        try_out: function that returns, for each of some candidates, the ms of a step on a sample of the model, or why
            there is no such step.
        fits: function that returns why there is no plan of the whole model for a candidate; empty where there is one.
        tried: number of placements, those predicted to be fastest, that are tried.

    Raises:
        PlanError: there is no plan for any candidate; the message is that of the fastest one.
    """
    candidates = [Candidate(towers=EVERYWHERE, sharding=kind, trial_ms=ms) for kind, ms in measured.steps.items()]
    placed = [
        Candidate(towers=str(placement), sharding=sharding, predicted=predict_step(placement, measured))
        for placement in placements(measured.towers, measured.world_size)
    ]
    placed.sort(key=lambda candidate: candidate.ms)
    hopeful = [candidate for candidate in placed[:tried] if candidate.ms < _HOPELESS * min(measured.steps.values())]
    candidates += hopeful
    candidates = [_with_trial(*pair) for pair in zip(candidates, try_out(candidates), strict=True)]
    candidates += placed[len(hopeful) :]
    if refused:
        candidates.append(Candidate(towers="tower_parallel", sharding=sharding, refused=refused))
    candidates.sort(key=_order)
    for index, candidate in enumerate(candidates):
        reason = candidate.refused or fits(candidate)
        if not reason:
            break
        candidates[index] = dataclasses.replace(candidate, refused=reason)
    else:
        raise PlanError(candidates[0].refused)
    return Decision(candidates=sorted(candidates, key=_order), measurements=measured)


def _with_trial(candidate: Candidate, outcome: float | str) -> Candidate:
    """Returns the candidate with the ms of a step, or with why there is no such step."""
    if isinstance(outcome, str):
        return dataclasses.replace(candidate, refused=outcome)
    return dataclasses.replace(candidate, trial_ms=outcome)


def _order(candidate: Candidate) -> tuple[bool, bool, float]:
    """Sort key: refused last, tried before predicted, then fastest first."""
    return bool(candidate.refused), candidate.trial_ms is None, candidate.ms


_SECONDS = 1.0  # spent on whole steps of each candidate that is tried


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
    """Measures, and returns the config with the chosen placement in place of ``auto``, and the decision. Collective.

    Args:
        model: unsharded model; it is not changed.
        batch: one of this rank's batches.
        runtime: this process's rank and device.
        config: config whose free settings are chosen: where towers run, and the sharding type where it is ``auto``.
        optimizer: optimizers of tables and dense layers.
        everywhere: model to use where all towers run on every rank, such as one with merged look-ups; ``model`` where
            not given.
        together: why towers must run on every rank; empty where they need not.
        more: further batches of this rank, as many on every rank, which the trials train on in turn.
        steps: makes what runs the steps of a trial: for a training by :func:`train`, its ``checked_steps``; TorchRec's
            pipeline without checks where not given.

    Raises:
        PlanError: the tables fit under no placement.
    """
    everywhere = model if everywhere is None else everywhere
    refused = together or why_together(model, runtime)

    def why_no_plan(candidate: Candidate, measured: Measurements | None = None) -> str:
        """Returns why there is no plan for a candidate, in one line; empty where there is one."""
        planned = everywhere if candidate.towers == EVERYWHERE else model
        asked = as_config(config, candidate)
        try:
            plan_sharding(planned, runtime, asked, optimizer=optimizer, batch_size=len(batch), measured=measured)
        except ValueError as error:  # a PlanError, or an optimizer that runs under no such sharding
            return str(error).splitlines()[0]
        return ""

    # Tables that do not fit on all ranks together fit under no placement: refused before anything is measured.
    whole = dataclasses.replace(config, towers=EVERYWHERE)
    plan_sharding(everywhere, runtime, whole, optimizer=optimizer, batch_size=len(batch))
    kinds: list[str] = [config.sharding]
    if config.sharding == "auto" and not why_no_plan(Candidate(towers=EVERYWHERE, sharding="table_wise")):
        kinds = ["table_wise", "auto"]
    with torch.random.fork_rng(devices=[]), Trials(runtime, optimizer, steps) as trials:
        flat = Sample.of(everywhere, batch, more)
        sample = None if refused else Sample.of(model, batch, more)
        measured = measure(flat, sample, runtime, config, optimizer, kinds, trials)

        def try_out(candidates: Sequence[Candidate]) -> list[float | str]:
            """Returns the ms of a step of each candidate, tried in turn, or why there is no such step."""
            outcomes: list[float | str] = [""] * len(candidates)
            for index, candidate in enumerate(candidates):
                try:
                    if candidate.towers != EVERYWHERE:  # measure() has added the others
                        trials.add(sample or flat, as_config(config, candidate), measured)
                except ValueError as error:
                    outcomes[index] = str(error).splitlines()[0]
            ready = [index for index, reason in enumerate(outcomes) if not reason]
            times = trials.ms([as_config(config, candidates[index]) for index in ready], _SECONDS)
            for index, ms in zip(ready, times, strict=True):
                outcomes[index] = ms
            return outcomes

        def fits(candidate: Candidate) -> str:
            return why_no_plan(candidate, measured)

        decision = choose(measured, kinds[0], refused=refused, try_out=try_out, fits=fits)
    return as_config(config, decision.taken), decision


def as_config(config: PlanConfig, candidate: Candidate) -> PlanConfig:
    """Returns ``config`` with the placement and sharding type of a candidate."""
    return dataclasses.replace(config, towers=candidate.towers, sharding=candidate.sharding)  # type: ignore[arg-type]


def why_together(model: nn.Module, runtime: Runtime) -> str:
    """Returns why the towers of ``model`` cannot have ranks of their own; empty where they can."""
    try:
        tower_placement(model, "tower_parallel", runtime.world_size)
    except PlacementError as error:
        return str(error).removeprefix("plan.towers=tower_parallel: ")
    return ""
