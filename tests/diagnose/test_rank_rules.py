"""Rules about ranks on recorded facts: each cause is the first finding of its own facts, and its rank is named."""

import dataclasses
import json

import pytest

from tests.diagnose.recorded import HEALTHY, HEALTHY_RANKS, ON_RANKS, RECORDED, ranks
from torchrec_ext.diagnose import Diagnosis
from torchrec_ext.diagnose.facts import Facts
from torchrec_ext.diagnose.rules import causes
from torchrec_ext.diagnose.rules.answers import answers
from torchrec_ext.observe.counts import TableFacts

pytestmark = pytest.mark.unit


def faults(recorded: Facts) -> list[str]:
    return [
        finding.cause
        for finding in causes.findings(recorded)
        if finding.size in ("large", "medium")
    ]


def test_every_cause_has_recorded_facts() -> None:
    assert list(ON_RANKS) == list(causes.RANK_RULES)


@pytest.mark.parametrize("cause", ON_RANKS)
def test_a_cause_of_ranks_is_the_only_fault_of_its_facts_and_its_ranks_are_named(
    cause: str,
) -> None:
    recorded, named = ON_RANKS[cause]
    assert faults(recorded) == [cause]
    diagnosis = Diagnosis(recorded)
    assert diagnosis.verdict == cause
    finding = diagnosis.findings[0]
    assert finding.ranks == named
    if len(named) == 1:
        assert f"rank {named[0]}" in finding.title
    assert any(letter.isdigit() for letter in finding.evidence[0])
    assert all(
        remedy.lines and remedy.changes and remedy.basis for remedy in finding.remedies
    )
    assert json.loads(diagnosis.to_json())["findings"][0]["ranks"] == list(named)


def test_ranks_that_compute_alike_have_no_fault() -> None:
    diagnosis = Diagnosis(HEALTHY_RANKS)
    assert diagnosis.verdict == "products"
    assert {finding.size for finding in diagnosis.findings} <= {"small", "offer"}


def test_one_process_has_no_finding_about_ranks() -> None:
    for recorded in (*RECORDED.values(), HEALTHY):
        assert not causes.rank_findings(recorded)


@pytest.mark.parametrize("cause", ON_RANKS)
def test_ranks_whose_steps_could_not_be_traced_give_fewer_findings_and_no_error(
    cause: str,
) -> None:
    recorded, _ = ON_RANKS[cause]
    untraced = dataclasses.replace(
        recorded, ranks=[dataclasses.replace(each, steps=()) for each in recorded.ranks]
    )
    assert not causes.rank_findings(untraced)
    assert str(Diagnosis(untraced))
    assert not causes.rank_findings(dataclasses.replace(recorded, rounds=()))
    unprobed = [
        dataclasses.replace(each, alone_s=0.0, together_s=0.0, send_s=0.0)
        for each in recorded.ranks
    ]
    assert str(
        Diagnosis(
            dataclasses.replace(
                recorded, ranks=unprobed, latency_s=0.0, link_bytes=0, collectives=()
            )
        )
    )


def test_the_gain_of_a_rank_as_fast_as_the_others_is_what_they_wait_for_it() -> None:
    """12 of 17.51 ms go."""
    (finding,) = (
        each
        for each in causes.findings(ON_RANKS["straggler_input"][0])
        if each.cause == "straggler_input"
    )
    gain = finding.remedies[0].gain
    assert gain is not None
    assert gain.low <= 17.51 / (17.51 - 11.99) <= gain.high
    assert finding.cost == pytest.approx(11.99 / 17.5, rel=0.01)


def test_a_rank_whose_ids_explain_it_is_no_straggler() -> None:
    recorded, _ = ON_RANKS["imbalanced_table"]
    without = dataclasses.replace(
        recorded,
        ranks=[dataclasses.replace(each, tables=()) for each in recorded.ranks],
    )
    assert faults(without) == ["slow_rank"]


def test_threads_that_share_cores_which_nobody_waits_for_are_no_fault() -> None:
    assert faults(ranks({"cores": (0,)}, {"cores": (0,)})) == []


def test_ranks_on_several_hosts_are_named_with_their_hosts() -> None:
    recorded, _ = ON_RANKS["straggler_backward"]
    hosts = [
        dataclasses.replace(each, host=f"node{each.rank}") for each in recorded.ranks
    ]
    assert "rank 2 (on node2) is slow in its backward only" in str(
        Diagnosis(dataclasses.replace(recorded, ranks=hosts))
    )


def test_ranks_are_compared_with_a_single_one() -> None:
    """Two ranks that exchange for 30 ms after 5 of computing are slower than one that computes twice."""
    recorded, _ = ON_RANKS["latency"]
    (answer,) = (each for each in answers(recorded) if each.name == "one rank, not 2")
    assert answer.helps == "yes"
    assert answer.gain is not None
    assert answer.gain.low <= 35.01 / (2 * 5.01) <= answer.gain.high
    names = [each.name for each in answers(recorded)]
    assert names == [
        *(
            "loader workers",
            "other thread numbers",
            "one rank, not 2",
            "a larger batch",
            "mixed precision",
        ),
        "torch.compile",
    ]


def test_the_page_has_a_line_for_each_rank_and_each_kind_of_collective() -> None:
    page = str(Diagnosis(ON_RANKS["unmerged_exchange"][0]))
    assert "48 all_reduce in a step: 66.0 KiB" in page
    assert sum(line.split()[:1] in (["0"], ["1"]) for line in page.splitlines()) == 2
    assert not str(Diagnosis(HEALTHY_RANKS, rank=1))


def lines_of(recorded: Facts, cause: str) -> str:
    finding = causes.RANK_RULES[cause](recorded)
    assert finding is not None
    return " ".join(line for remedy in finding.remedies for line in remedy.lines)


@pytest.mark.parametrize("cause", ["latency", "bandwidth"])
def test_what_is_proposed_for_an_exchange_is_about_what_is_exchanged(
    cause: str,
) -> None:
    """Gradients, which no precision of a plan is about; rows of sharded tables, which local steps exchange as ever."""
    recorded = dataclasses.replace(ON_RANKS[cause][0], recipe=True)
    sums = lines_of(recorded, cause)
    assert "sync.mode=local_sgd" in sums
    assert "plan." not in sums
    tables = [TableFacts(name="item", rows=1_000, dim=8, read=64, sharding="row_wise")]
    sharded = dataclasses.replace(
        recorded,
        collectives=[
            dataclasses.replace(each, name="all_to_all")
            for each in recorded.collectives
        ],
        ranks=[dataclasses.replace(each, tables=tables) for each in recorded.ranks],
    )
    rows = lines_of(sharded, cause)
    assert "sync.mode" not in rows
    assert "--set plan.sharding=data_parallel" in rows
    assert ("plan.forward_precision=bf16" in rows) == (cause == "bandwidth")
    tables[0] = dataclasses.replace(tables[0], rows=10_000_000)
    assert "plan.sharding" not in lines_of(sharded, cause), "320 MB on every rank"


@pytest.mark.parametrize("cause", ["latency", "unmerged_exchange"])
def test_towers_on_ranks_of_their_own_are_not_told_to_step_alone(cause: str) -> None:
    """sync.mode=local_sgd is refused for them, and they are apart already."""
    recorded = dataclasses.replace(ON_RANKS[cause][0], recipe=True, towers_apart=True)
    assert not {"sync.mode=local_sgd", "plan.towers=tower_parallel"} & set(
        lines_of(recorded, cause).split()
    )
