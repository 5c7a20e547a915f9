"""Verdicts on recorded facts: each cause is the first finding of its own facts, and no fault of the others'."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from tests.diagnose.recorded import (
    RECORDED,
    ROWS,
    TABLE,
    facts,
    steps,
)
from torchrec_ext.diagnose import Diagnosis, Finding
from torchrec_ext.diagnose.findings import (
    Facts,
    LineFacts,
    LoaderFacts,
    Trial,
)
from torchrec_ext.diagnose.trials import trials
from torchrec_ext.diagnose.verdicts import faults, findings

pytestmark = pytest.mark.unit


def causes(recorded: Facts) -> list[str]:
    return [finding.cause for finding in faults(recorded)]


def found(recorded: Facts, cause: str) -> Finding:
    return next(each for each in findings(recorded) if each.cause == cause)


@pytest.mark.parametrize("cause", RECORDED)
def test_a_cause_is_the_first_finding_of_its_facts_and_the_only_fault(
    cause: str,
) -> None:
    assert causes(RECORDED[cause]) == [cause]
    assert Diagnosis(RECORDED[cause]).verdict == cause
    evidence = found(RECORDED[cause], cause).evidence
    assert any(letter.isdigit() for letter in evidence[0])


@pytest.mark.parametrize("cause", ["untouched_rows", "launches"])
def test_adopt_is_no_remedy_of_a_step_that_it_refuses_or_that_was_measured_slower(
    cause: str,
) -> None:
    recorded = RECORDED[cause]
    adopted, *others = found(recorded, cause).remedies
    assert adopted.name.startswith("adopt: the step captured")
    assert "step = adopt(model, optimizer, loss)" in adopted.lines
    refused = dataclasses.replace(recorded, not_measured={"captured": "it is sharded"})
    slower = dataclasses.replace(recorded, captured=[(10.0, 15.0)] * 3)
    for without in (refused, slower):
        remedies = found(without, cause).remedies
        assert not [each for each in remedies if "adopt" in f"{each.name} {each.lines}"]
        assert set(others) <= set(remedies)


def test_a_step_that_a_trial_makes_faster_is_not_called_right() -> None:
    diagnosis = Diagnosis(facts(steps(10.0, bf16=5.0), ops=10, product_s=9e-3))
    assert diagnosis.verdict == "products"
    headline = str(diagnosis).splitlines()[0]
    assert "nothing is wrong" not in headline
    assert "it is faster with: bf16 autocast" in headline
    slow = facts({**steps(10.0), "optimizer": 8.0}, ops=10)
    headline = str(Diagnosis(slow)).splitlines()[0]
    assert re.search(r"the optimizer takes \d\d% of an iteration", headline)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_facts_that_lack_experiments_give_fewer_findings_and_no_error(
    name: str,
) -> None:
    """Whatever could not be measured: the rest is still said."""
    recorded = RECORDED[name]
    for missing in set(recorded.rounds[0]) - {"data"}:
        rounds = [
            {name: value for name, value in each.items() if name != missing}
            for each in recorded.rounds
        ]
        less = dataclasses.replace(
            recorded, rounds=rounds, not_measured={missing: "it raised"}
        )
        diagnosis = Diagnosis(less)
        assert f"{missing}: it raised" in str(diagnosis)
        json.loads(diagnosis.to_json())


def trial(recorded: Facts, name: str) -> Trial:
    (made,) = (each for each in trials(recorded) if each.name.startswith(name))
    return made


@pytest.mark.parametrize(
    ("recorded", "name", "middle", "helps"),
    [
        (RECORDED["loader_waits"], "batches ready", 12.9 / 2.3, "yes"),
        (RECORDED["untouched_rows"], "large tables", 83.21 / 4.71, "yes"),
        (RECORDED["untouched_rows"], "4 times", 83.21 / (0.01 + 84 / 4), "yes"),
        (RECORDED["threads"], "1 thread(s), not 8", 20.81 / 9.81, "yes"),
        (facts(steps(10.0, bf16=12.0)), "bf16", 10.01 / 12.01, "no"),
        # After its loader a step takes twice as long as in a row.
        (
            facts({**steps(4.0, ready=2.0, bf16=1.0), "data": 10.0}),
            "bf16",
            14 / 12,
            "yes",
        ),
        (
            facts(steps(10.0), captured=((10.0, 2.0), (10.0, 2.5), (10.0, 2.0))),
            "the step captured",
            5.0,
            "yes",
        ),
    ],
)
def test_a_trial_is_the_ratio_of_paired_rounds(
    recorded: Facts, name: str, middle: float, helps: str
) -> None:
    gain = trial(recorded, name).gain
    assert gain.middle == pytest.approx(middle, rel=0.01)
    assert gain.helps == helps


def test_rounds_that_are_spread_too_far_carry_no_verdict() -> None:
    rounds = [
        {"data": 0.0, "sleep": 0.0, "step": 0.01 * scale}
        for scale in (1, 4, 1, 5, 1, 4, 6)
    ]
    diagnosis = Diagnosis(Facts(rounds=rounds))
    assert diagnosis.verdict == "noisy"
    assert "too noisy for a verdict: the middle half of 7 rounds" in diagnosis.noisy
    assert "10 ms to 60 ms" in diagnosis.noisy
    assert diagnosis.noisy in " ".join(str(diagnosis).split())
    few = Diagnosis(Facts(rounds=rounds[:3]))
    assert "too few rounds for a verdict: 3 of 4; give more time" in few.noisy


def test_threads_that_wait_for_somebody_elses_core_are_no_fault_of_the_program() -> (
    None
):
    """Two threads on two cores, one of which others keep busy; eight threads are too many whatever others do."""
    recorded = facts(steps(20.0, one_thread=9.0), threads=2, busy=1.0)
    assert causes(recorded) == []
    assert "while others keep 1.0 cores busy" in trial(recorded, "1 thread").why
    assert causes(dataclasses.replace(recorded, busy=0.1)) == ["threads"]
    assert causes(dataclasses.replace(recorded, threads=8)) == ["threads"]
    idle = facts(steps(40.0, all_threads=22.0), threads=1, product_s=36e-3)
    assert Diagnosis(idle).findings[0].title == "cores stay idle"


def test_a_loader_that_collates_for_long_is_not_read_row_by_row() -> None:
    """Rows take 1 ms of a batch, collate_fn 9."""
    tokenising = LoaderFacts(dataset="Texts", row_calls=256, row_s=4e-6, collate_s=9e-3)
    line = LineFacts(
        name="data.py:8 in collate",
        text="tokens = tokenise(text)",
        phase="data",
        seconds=9e-3,
    )
    recorded = facts(
        {**steps(2.0), "data": 10.0},
        loader=tokenising,
        ops=40,
        lines=(line,),
        sampled_s=12e-3,
    )
    finding = Diagnosis(recorded).findings[0]
    assert finding.cause == "loader_rows"
    assert finding.title.startswith("collate_fn computes")
    assert (
        "75% of an iteration is at data.py:8 in collate: tokens = tokenise(text)"
        in finding.evidence
    )
    by_row = found(RECORDED["loader_rows"], "loader_rows")
    assert by_row.title == "the Dataset is read row by row in Python"
    assert ROWS.dataset in by_row.evidence[1]


WORKERS = dataclasses.replace(
    ROWS,
    workers=2,
    worker_s=12e-3,
    worker_sleep_s=0.1e-3,
    worker_lines=(LineFacts(name="data.py:8 in read", phase="data", seconds=11e-3),),
)
# What workers do, measured in this process, with the verdict and a part of its title.
OF_WORKERS = {
    "compute by row": (WORKERS, "loader_rows", "row by row in Python"),
    "collate": (
        dataclasses.replace(WORKERS, row_s=1e-6, collate_s=11e-3),
        "loader_rows",
        "collate_fn computes, and",
    ),
    "compute": (
        dataclasses.replace(WORKERS, row_calls=0),
        "loader_rows",
        "the loader computes, and",
    ),
    "wait": (
        dataclasses.replace(WORKERS, worker_sleep_s=11e-3),
        "loader_waits",
        "the loader waits",
    ),
    "unknown": (LoaderFacts(workers=2), "loader_waits", "the loader waits"),
}


@pytest.mark.parametrize("name", OF_WORKERS)
def test_workers_that_starve_the_step_have_the_verdict_of_their_own_work(
    name: str,
) -> None:
    loader, cause, title = OF_WORKERS[name]
    recorded = facts({**steps(1.0), "data": 5.0, "sleep": 4.9}, loader=loader)
    first = Diagnosis(recorded).findings[0]
    assert first.cause == cause
    assert title in first.title
    at_line = [each for each in first.evidence if "is at data.py:8 in read" in each]
    assert len(at_line) == len(loader.worker_lines)


def test_a_cause_that_rounds_confirm_stands_however_far_they_are_spread() -> None:
    """Threads that wait for cores make the noise; one thread is twice as fast in each round."""
    scales = (1, 4, 1, 5, 1, 4, 6)
    rounds = [
        {"data": 0.0, "sleep": 0.0, "step": 0.02 * each, "one_thread": 0.01 * each}
        for each in scales
    ]
    recorded = Facts(rounds=rounds, threads=8, cores=2)
    assert Diagnosis(recorded).verdict == "threads"
    unclear = [
        {**each, "one_thread": 0.02 * scale}
        for each, scale in zip(rounds, scales[::-1], strict=True)
    ]
    assert Diagnosis(dataclasses.replace(recorded, rounds=unclear)).verdict == "noisy"


def test_a_share_of_three_in_four_rounds_stands_however_far_they_are_spread() -> None:
    """Ops of 5 us where the machine is fast and of 30 where it is slow are a step of 1,000 ops in each round."""
    rounds = [
        {"data": 0.0, "sleep": 0.0, "step": 6e-3 * each, "op": 5e-6 * each}
        for each in (1, 4, 1, 5, 1, 4, 6)
    ]
    assert Diagnosis(Facts(rounds=rounds, ops=1_000)).verdict == "launches"
    unclear = [{**each, "op": 5e-6} for each in rounds]
    assert Diagnosis(Facts(rounds=unclear, ops=1_000)).verdict == "noisy"


def test_large_tables_that_no_experiment_looked_at_are_not_called_healthy() -> None:
    unknown = facts(
        steps(83.2),
        tables=(TABLE,),
        ops=202,
        not_measured={"still_tables": "a round takes 9 s already"},
    )
    diagnosis = Diagnosis(unknown)
    assert diagnosis.verdict == "noisy"
    assert "not known (a round takes 9 s already)" in diagnosis.noisy


def test_verdicts_need_no_torch() -> None:
    code = (
        "import sys, tests.diagnose.recorded as r; from torchrec_ext.diagnose.report import Diagnosis; "
        "print(Diagnosis(r.HEALTHY).verdict, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["products", "False"]


LINE = LineFacts(
    name="model.py:9 in forward",
    text="x = self.layers(x)",
    seconds=9e-3,
    ops=40,
    op_s=2e-3,
)
# Facts, one of their causes, and its share of an iteration.
COSTS: dict[str, tuple[Facts, str, float]] = {
    "seconds that go with threads are no launches": (
        facts(
            steps(20.0, one_thread=10.0, op=0.12), threads=8, ops=100, product_s=4e-3
        ),
        "launches",
        6 / 20,
    ),
    "a line that syncs costs what was sampled there": (
        dataclasses.replace(
            RECORDED["host_syncs"],
            lines=(
                LineFacts(
                    name="train.py:31 in loss",
                    seconds=4e-3,
                    ops=1_400,
                    op_s=1.5e-3,
                    sync_ops=1_400,
                ),
            ),
            sampled_s=2 * 3.11e-3,
        ),
        "host_syncs",
        2 / 3.11,
    ),
    "a line whose ops explain it holds nothing": (
        facts(
            steps(10.0),
            ops=60,
            lines=(dataclasses.replace(LINE, op_s=7.5e-3),),
            sampled_s=10e-3,
        ),
        "your_line",
        0.0,
    ),
    "a line whose ops do not explain it holds the step": (
        facts(steps(10.0), ops=60, lines=(LINE,), sampled_s=10e-3),
        "your_line",
        0.61,
    ),
    "no line holds a step whose ops could not be counted": (
        dataclasses.replace(
            RECORDED["your_line"],
            ops=0,
            not_measured={"ops": "NotImplementedError: no storage"},
        ),
        "your_line",
        0.0,
    ),
    "tables that are no slower than small ones": (
        facts(steps(10.0, still_tables=9.9), tables=(TABLE,), ops=40),
        "untouched_rows",
        0.0,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_cause_costs_what_goes_with_it(name: str) -> None:
    recorded, cause, share = COSTS[name]
    cost = sum(each.cost for each in findings(recorded) if each.cause == cause)
    assert cost == pytest.approx(share, abs=0.03)
