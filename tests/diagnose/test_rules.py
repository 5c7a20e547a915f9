"""Rules on recorded facts: each cause is the first finding of its own facts, and no fault of the others'."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.diagnose.recorded import DRIFT, HEALTHY, RECORDED, ROWS, TABLE, facts, steps
from torchrec_ext.diagnose import Diagnosis, Gain
from torchrec_ext.diagnose.facts import DRIFT as MOMENTS
from torchrec_ext.diagnose.facts import Facts, LineFacts, LoaderFacts, paired_gain
from torchrec_ext.diagnose.findings import Answer
from torchrec_ext.diagnose.rules import causes, costs
from torchrec_ext.diagnose.rules.answers import answers
from torchrec_ext.observe.counts import AllItems, WholeTableOp

CAUSES = [
    cause
    for cause in causes.RULES
    if cause not in ("all_items", "small_batch", "precision")
]


def faults(recorded: Facts) -> list[str]:
    return [
        finding.cause
        for finding in causes.findings(recorded)
        if finding.size in ("large", "medium")
    ]


def test_every_cause_has_recorded_facts() -> None:
    assert sorted(RECORDED) == sorted(CAUSES)


def test_every_rule_stands_in_the_table_for_users() -> None:
    page = (Path(__file__).parents[2] / "docs" / "why_slow.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} >= {
        *causes.RULES,
        *causes.RANK_RULES,
    }


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_the_first_finding_of_its_facts_and_the_only_fault(
    cause: str,
) -> None:
    assert faults(RECORDED[cause]) == [cause]
    assert Diagnosis(RECORDED[cause]).verdict == cause
    (finding,) = (
        each for each in causes.findings(RECORDED[cause]) if each.cause == cause
    )
    assert finding.evidence
    assert all(
        any(letter.isdigit() for letter in sentence)
        for sentence in finding.evidence[:1]
    )
    assert all(
        remedy.lines and remedy.changes and remedy.basis for remedy in finding.remedies
    )
    assert all(
        remedy.gain is None or remedy.gain.low <= remedy.gain.high
        for remedy in finding.remedies
    )


def test_nothing_is_wrong_with_a_step_that_is_its_products() -> None:
    diagnosis = Diagnosis(HEALTHY)
    assert diagnosis.verdict == "products"
    assert {finding.size for finding in diagnosis.findings} <= {"small", "offer"}
    # 6.5e9 operations at 8e10 a second and 28 bytes of 1.2 M parameters at 2e10, of
    # 92.01 ms.
    assert costs.limit_share(HEALTHY) == pytest.approx(
        (6.5e9 / 8e10 + 28 * 1.2e6 / 2e10) / 0.09201, rel=1e-6
    )
    assert "90% of this machine's limit" in str(diagnosis)
    assert "products by layer: 2 80%, 0 20%" in str(diagnosis)


def test_a_cause_that_has_no_time_to_explain_is_not_a_finding() -> None:
    """A table of many rows with an optimizer that moves only those read; few ops; threads that are right."""
    assert (
        faults(
            facts(
                steps(10.0, small_tables=9.9, one_thread=10.5),
                tables=(TABLE,),
                ops=40,
                threads=2,
            )
        )
        == []
    )


@pytest.mark.parametrize("cause", CAUSES)
def test_facts_that_lack_experiments_give_fewer_findings_and_no_error(
    cause: str,
) -> None:
    """Whatever could not be measured: the rest is still said."""
    recorded = RECORDED[cause]
    names = set(recorded.rounds[0]) - {"data"}
    for missing in names:
        rounds = [
            {name: value for name, value in each.items() if name != missing}
            for each in recorded.rounds
        ]
        less = Facts(
            **{
                **vars(recorded),
                "rounds": rounds,
                "not_measured": {missing: "it raised"},
            }
        )
        diagnosis = Diagnosis(less)
        assert {finding.cause for finding in diagnosis.findings} <= set(causes.RULES)
        assert f"{missing}: it raised" in str(diagnosis)
        json.loads(diagnosis.to_json())


def gain_of(cause: str, name: str) -> Gain:
    (gain,) = (
        remedy.gain
        for finding in causes.findings(RECORDED[cause])
        for remedy in finding.remedies
        if finding.cause == cause and remedy.name.startswith(name)
    )
    assert gain is not None
    return gain


@pytest.mark.parametrize(
    ("cause", "remedy", "realised"),
    [
        # prototypes' cases: 11.1 and 3.0 ms, 5.3x with all data ready
        ("row_python", "__getitems__", 3.8),
        ("row_python", "Rows.of and adopt", 19.8),
        ("untouched_rows", "adopt", 69.0),  # 83.2 -> 1.2 ms where batches are given
        ("launches", "adopt", 5.0),
        ("loader_sleeps", "batches ready", 5.5),
        ("too_many_threads", "one thread", 20.8 / 9.8),
        ("too_few_threads", "all cores", 40 / 22),
        ("between_steps", "evaluation", 13.21 / 5.71),
        # benchmarks/hybrid.py's, whose ceiling is 1.75
        ("sequential_towers", "towers at the same time", 1.26),
    ],
)
def test_a_gain_that_came_true_lies_in_the_interval(
    cause: str, remedy: str, realised: float
) -> None:
    gain = gain_of(cause, remedy)
    assert gain.low <= realised <= gain.high


def test_remedies_name_the_lines_to_paste() -> None:
    text = str(Diagnosis(RECORDED["row_python"]))
    assert "| rows = Rows.of(dataset, batch_size=256, negatives=...)" in text
    assert "| step = adopt(model, optimizer, loss, rows=rows)" in text
    text = str(Diagnosis(RECORDED["untouched_rows"]))
    assert "| step = adopt(model, optimizer, loss)" in text
    assert "| loss, _ = step(*batch)" in text
    assert "12,400,000 rows, of which a step reads at most 1,024" in " ".join(
        text.split()
    )


def test_an_optimizer_that_takes_sparse_gradients_is_kept() -> None:
    recorded = dataclasses.replace(RECORDED["untouched_rows"], optimizers=("SGD",))
    text = str(Diagnosis(recorded))
    assert "SparseAdam" not in text
    assert "| nn.Embedding(..., sparse=True)  # as SGD reads it" in text
    assert "another optimizer" not in text


def answer(recorded: Facts, name: str) -> Answer:
    (made,) = (each for each in answers(recorded) if each.name == name)
    return made


def test_six_things_that_people_try_are_answered() -> None:
    for recorded in (*RECORDED.values(), HEALTHY):
        assert [each.name for each in answers(recorded)] == [
            "loader workers",
            "other thread numbers",
            "DDP on this machine",
            "a larger batch",
            "mixed precision",
            "torch.compile",
        ]


def test_the_second_user_gets_his_answer() -> None:
    """Workers make it slower, and why; a larger batch and compiling gain next to nothing."""
    recorded = RECORDED["row_python"]
    workers = answer(recorded, "loader workers")
    assert workers.helps == "no"
    assert "in memory" in workers.why
    assert "real worker" in workers.why
    assert answer(recorded, "mixed precision").helps == "no"
    assert answer(recorded, "torch.compile").gain.high < 1.3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("recorded", "name", "helps"),
    [
        (HEALTHY, "loader workers", "no"),
        (HEALTHY, "torch.compile", "no"),
        (HEALTHY, "a larger batch", "no"),
        (HEALTHY, "other thread numbers", "not known"),
        (RECORDED["untouched_rows"], "DDP on this machine", "no"),
        (RECORDED["untouched_rows"], "a larger batch", "yes"),
        (RECORDED["launches"], "torch.compile", "yes"),
        (RECORDED["host_syncs"], "torch.compile", "not known"),
        (RECORDED["too_many_threads"], "other thread numbers", "yes"),
        (
            facts(steps(10.0, bf16=5.0), ops=10, product_s=9e-3),
            "mixed precision",
            "yes",
        ),
        (
            facts(steps(10.0, bf16=12.0), ops=10, product_s=9e-3),
            "mixed precision",
            "no",
        ),
        (facts(steps(10.0), cores=1), "DDP on this machine", "no"),
    ],
)
def test_what_helps_and_what_does_not(recorded: Facts, name: str, helps: str) -> None:
    assert answer(recorded, name).helps == helps


def test_what_changes_the_mathematics_is_an_offer_and_says_what_it_changes() -> None:
    made = causes.findings(
        facts({**steps(10.0, bf16=5.0), "quadruple": 20.0}, ops=10, product_s=9e-3)
    )
    assert [(finding.cause, finding.size) for finding in made] == [
        ("small_batch", "offer"),
        ("precision", "offer"),
    ]
    batch, precision = (finding.remedies[-1].changes for finding in made)
    assert "another batch size" in batch
    assert "rounded to 8 bits" in precision


def test_a_worker_that_was_tried_on_a_busy_machine_is_no_promise() -> None:
    """A second process gets a second share of cores that others want, which is no gain of the worker's."""
    more = {"loader": ROWS, "worker": ((15.0, 11.5), (15.1, 11.4)), "ops": 202}
    idle, busy = (
        facts({**steps(3.0), "data": 11.1}, busy=cores, **more) for cores in (0.1, 1.4)
    )
    assert answer(idle, "loader workers").helps == "yes"
    assert answer(busy, "loader workers").helps == "perhaps"
    assert "others keep 1.4 cores busy" in answer(busy, "loader workers").why


def test_threads_that_were_not_tried_are_said_not_to_be() -> None:
    recorded = facts(
        steps(10.0), not_measured={"all_threads": "others keep 1.3 of 2 cores busy"}
    )
    assert (
        answer(recorded, "other thread numbers").why
        == "not tried: others keep 1.3 of 2 cores busy"
    )


def test_drift_of_the_machine_cancels_and_noise_of_a_variant_widens() -> None:
    steady = paired_gain([2.0] * 9)
    assert steady.low == pytest.approx(2 / MOMENTS)
    assert steady.high == pytest.approx(2 * MOMENTS)
    drifting = facts(steps(10.0, one_thread=5.0)).gain(
        lambda each: each["data"] + each["one_thread"]
    )
    assert drifting.high / drifting.low == pytest.approx(MOMENTS**2)
    noisy = paired_gain(
        [2.0 * drift for drift in (1.0, 1.6, 0.6, 1.5, 0.7, 1.0, 1.4, 0.8, 1.2)]
    )
    assert noisy.low < steady.low
    assert noisy.high > steady.high


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
    assert (
        "too few rounds for a verdict: 3 of 4; give more time (budget_s)" in few.noisy
    )


def test_towers_are_told_apart_only_where_cores_are_idle() -> None:
    recorded = RECORDED["sequential_towers"]
    finding = Diagnosis(recorded).findings[0]
    assert finding.cost == pytest.approx((0.4 * 0.9 * 20 - 0.2) / 20.01, rel=1e-3)
    assert (
        'adopt_towers(model, optimizer, loss, runtime, {"user": 0, "item": 1}, batch)'
        in str(finding.remedies[0])
    )
    recipe = (
        Diagnosis(dataclasses.replace(recorded, recipe=True)).findings[0].remedies[0]
    )
    assert recipe.lines == ("rec.train.hybrid -j 1x2  # and --set plan.towers=auto",)
    for other in (
        {"threads": 2},
        {"cores": 1},
        {"busy": 1.0},
        {"towers_apart": True},
        {"towers": recorded.towers[:1]},
    ):
        assert faults(dataclasses.replace(recorded, **other)) == [], other
    threaded = dataclasses.replace(
        recorded,
        rounds=[
            {**each, "all_threads": 0.6 * each["step"]} for each in recorded.rounds
        ],
    )
    assert faults(threaded) == ["too_few_threads"]
    three = dataclasses.replace(
        recorded, cores=4, towers=(("Three.a", 0.3), ("Three.b", 0.3), ("Three.c", 0.3))
    )
    assert "on 3 ranks" in Diagnosis(three).findings[0].remedies[0].name


def test_lines_that_sync_are_sampled() -> None:
    """1,400 ops of 5 us are 6.2 ms by their price, of a step of 3.1 ms; the loop is at the line for 2 ms of it."""
    line = LineFacts(
        name="train.py:31 in loss", text="total += each.item()", seconds=4e-3, ops=1_400
    )
    line = dataclasses.replace(line, op_s=1.5e-3, sync_ops=1_400)
    sampled = dataclasses.replace(
        RECORDED["host_syncs"], lines=(line,), sampled_s=2 * 3.11e-3
    )
    finding = Diagnosis(sampled).findings[0]
    gain = finding.remedies[0].gain
    assert (finding.cause, finding.remedies[0].basis) == (
        "host_syncs",
        "predicted from the seconds at these lines",
    )
    assert finding.cost == pytest.approx(2 / 3.11, abs=0.01)
    assert gain is not None
    assert gain.low == pytest.approx(3.11 / (1.24 + 0.01) / MOMENTS, rel=0.02)
    assert gain.high == pytest.approx(3.11 / (0.6 * 1.1 + 0.01) * MOMENTS, rel=0.02)
    assert finding.evidence[-1] == "these lines take 4 ms of 6.22 ms"


def test_waits_for_a_gpu_are_counted_by_line() -> None:
    recorded = dataclasses.replace(RECORDED["host_syncs"], device_busy=0.3, kernels=700)
    (finding,) = (
        each for each in causes.findings(recorded) if each.cause == "host_syncs"
    )
    assert finding.evidence[0].startswith(
        "the host waits for the device 400 times a step"
    )
    assert finding.evidence[0].endswith(": train.py:31 in loss, 400")
    assert "non_blocking=True" in finding.remedies[0].lines[1]


def test_nothing_is_wrong_only_if_four_fifths_of_an_iteration_are_explained() -> None:
    assert costs.explained(HEALTHY) > 0.9
    unknown = facts(steps(92.0), ops=159, op_s=40e-3, product_s=20e-3)
    page = " ".join(str(Diagnosis(unknown)).split())
    assert costs.explained(unknown) == pytest.approx(0.44, abs=0.02)
    assert "nothing is wrong" not in page
    assert "56% of an iteration is not explained" in page


def test_lines_whose_ops_explain_them_are_no_finding() -> None:
    """A line that holds 9 of 10 ms with ops that take 7.5 ms; the same line with ops of 2 ms."""
    line = LineFacts(
        name="model.py:9 in forward",
        text="x = self.layers(x)",
        seconds=9e-3,
        ops=40,
        op_s=7.5e-3,
    )
    busy = facts(steps(10.0), ops=60, op_s=8e-3, lines=(line,), sampled_s=10e-3)
    assert "python_lines" not in faults(busy)
    held = dataclasses.replace(
        busy, op_s=2.5e-3, lines=(dataclasses.replace(line, op_s=2e-3),)
    )
    assert faults(held) == ["python_lines"]


def test_lines_are_no_finding_if_ops_could_not_be_counted() -> None:
    unknown = {
        "ops": 0,
        "op_s": 0.0,
        "not_measured": {"ops": "NotImplementedError: no storage"},
    }
    recorded = dataclasses.replace(RECORDED["python_lines"], **unknown)  # type: ignore[arg-type]
    assert faults(recorded) == []
    assert costs.explained(recorded) < 0.5


def test_what_is_left_of_a_step_bounds_the_gain_of_a_cut() -> None:
    """Of a step of 10 ms a line takes 9.4: the rest is known to be .6 ms, and does not go with the line."""
    line = LineFacts(
        name="train.py:9 in log", text="mean = np.mean(losses)", seconds=9.4e-3
    )
    recorded = facts(steps(10.0, op=1e-6), ops=60, lines=(line,), sampled_s=10.01e-3)
    (finding,) = (
        each for each in causes.findings(recorded) if each.cause == "python_lines"
    )
    gain = finding.remedies[0].gain
    assert gain is not None
    assert gain.low < 10 / 0.6 < gain.high < 2 * 10 / 0.6


def test_a_copy_of_a_table_costs_all_that_its_line_takes_and_is_one_cause() -> None:
    """A deep copy: 4 ms in its ops, 9 ms at its line, which gives memory back too."""
    copied = WholeTableOp(
        line="train.py:9 in step", rows=200_000, read=256, seconds=4e-3
    )
    line = LineFacts(
        name="train.py:9 in step",
        text="best = copy.deepcopy(model)",
        seconds=9e-3,
        ops=10,
        op_s=4e-3,
    )
    recorded = facts(
        steps(10.0), ops=60, lines=(line,), sampled_s=10.01e-3, whole_tables=(copied,)
    )
    assert faults(recorded) == ["whole_tables"]
    (finding,) = (
        each for each in causes.findings(recorded) if each.cause == "whole_tables"
    )
    assert finding.cost == pytest.approx(0.9, abs=0.01)
    gain = finding.remedies[0].gain
    assert gain is not None
    assert gain.low < 10 < gain.high


def test_rows_that_are_not_read_cost_no_more_than_their_optimizer_explains() -> None:
    """A step of 66 ms was timed as 50 with small tables, and its optimizer takes 1 ms: the rest is no sweep."""
    recorded = facts(
        steps(66.0, small_tables=50.0, optimizer=1.0), tables=(TABLE,), ops=60
    )
    assert "untouched_rows" not in [
        finding.cause for finding in causes.findings(recorded)
    ]


def test_what_a_step_takes_outside_of_its_ops_goes_with_a_softmax_over_all_items() -> (
    None
):
    """Its ops take 50 of 55 ms inside of ops, and 66 ms with the memory that they take and give back."""
    every = AllItems(line="loss.py:3 in loss", items=60_000, seconds=50e-3)
    recorded = facts(
        steps(66.0), ops=40, op_s=55e-3, product_s=20e-3, all_items=(every,)
    )
    (finding,) = (
        each for each in causes.findings(recorded) if each.cause == "all_items"
    )
    gain = finding.remedies[0].gain
    assert gain is not None
    assert gain.low < 66 / (66 - 60) < 66 / 4 < gain.high


def test_a_loop_goes_with_all_of_its_lines_and_their_backward() -> None:
    """A loop of two lines: 4,000 of 6,900 ops, 2,800 of them in backward; by hand it went 23 times as fast."""
    lines = (
        ("train.py:9 in loss", 3_200),
        ("backward", 2_800),
        ("train.py:8 in loss", 800),
        ("optimizer", 40),
    )
    recorded = facts(steps(34.0, op=0.0077), ops=6_870, op_lines=lines)
    (finding,) = (
        each for each in causes.findings(recorded) if each.cause == "launches"
    )
    gain = finding.remedies[0].gain
    assert gain is not None
    assert 1.5 < gain.low < 23 < gain.high


def test_ops_that_feed_values_to_python_are_no_loop_to_stack() -> None:
    read = {"sync_lines": (("train.py:5 in log", 120),), "syncs": 120, "sync_ops": 240}
    recorded = facts(
        steps(4.0, op=0.008), ops=320, op_lines=(("train.py:5 in log", 240),), **read
    )
    names = [
        remedy.name
        for finding in causes.findings(recorded)
        for remedy in finding.remedies
    ]
    assert not [name for name in names if name.startswith("one op on all tensors")]


def test_a_whole_table_in_backward_costs_what_goes_outside_of_its_ops_too() -> None:
    """15 ms of 17 in ops, of a step of 36 ms; by hand the rows that are read went 9.4 times as fast."""
    whole = WholeTableOp(
        line="train.py:9 in step", rows=60_000, read=256, seconds=2e-3, backward_s=13e-3
    )
    recorded = facts(steps(36.0), ops=60, op_s=17e-3, whole_tables=(whole,))
    (finding,) = (
        each for each in causes.findings(recorded) if each.cause == "whole_tables"
    )
    gain = finding.remedies[0].gain
    assert gain is not None
    assert gain.low < 9.4 < gain.high


def test_collections_that_are_seldom_and_long_count_by_their_mean() -> None:
    """One round of ten has a collection of 60 ms for each of its steps."""
    rounds = [
        {"data": 0.0, "step": 2e-3 + seconds, "gc": seconds}
        for seconds in [0.0] * 9 + [60e-3]
    ]
    (finding,) = (
        each
        for each in causes.findings(Facts(rounds=rounds))
        if each.cause == "garbage"
    )
    assert finding.size == "large"
    assert "6 ms of an iteration" in finding.evidence[0]


def test_a_softmax_over_all_items_is_an_offer_with_the_sampled_one() -> None:
    every = AllItems(line="loss.py:3 in loss", items=60_000, seconds=85e-3)
    finding = next(
        each
        for each in causes.findings(dataclasses.replace(HEALTHY, all_items=(every,)))
    )
    assert (finding.cause, finding.size) == ("all_items", "offer")
    assert finding.remedies[0].gain is not None
    assert finding.remedies[0].gain.low < 14.5 < finding.remedies[0].gain.high * 2
    assert not finding.remedies[0].keeps_mathematics
    few = AllItems(line="loss.py:3 in loss", items=60_000, seconds=5e-3)
    assert "all_items" not in [
        each.cause
        for each in causes.findings(dataclasses.replace(HEALTHY, all_items=(few,)))
    ]


def test_a_loader_that_collates_for_long_is_not_read_row_by_row() -> None:
    """Rows take 1 ms of a batch, collate_fn 9."""
    tokenising = LoaderFacts(
        kind="DataLoader", dataset="Texts", row_calls=256, row_s=4e-6, collate_s=9e-3
    )
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
    assert finding.cause == "loader_computes"
    assert finding.title.startswith("collate_fn computes")
    assert (
        "75% of an iteration is at data.py:8 in collate: tokens = tokenise(text)"
        in finding.evidence
    )


def test_a_loop_that_raises_later_is_a_verdict_of_its_own() -> None:
    diagnosis = Diagnosis(
        dataclasses.replace(
            HEALTHY, not_measured={"loop": "ValueError: 3001 steps (train.py:9)"}
        )
    )
    assert diagnosis.verdict == "loop failed"
    assert "it raised ValueError: 3001 steps (train.py:9)" in " ".join(
        str(diagnosis).split()
    )


def test_launches_on_a_device_are_the_gaps_between_its_kernels() -> None:
    """868 ops of 5 us are all of a step of 4.4 ms; the device runs kernels for 80 % of it."""
    recorded = RECORDED["launches"]
    busy = dataclasses.replace(recorded, kernels=900, device_busy=0.8)
    (finding,) = (each for each in causes.findings(busy) if each.cause == "launches")
    assert finding.cost == pytest.approx(0.2 * 4.4 / 4.41, rel=1e-6)
    assert (
        "the device runs 900 kernels and copies a step, for 80% of the time"
        in finding.evidence[1]
    )
    (eager,) = (each for each in causes.findings(recorded) if each.cause == "launches")
    assert eager.cost > 0.9


def launches_of(recorded: Facts) -> float:
    return sum(
        finding.cost
        for finding in causes.findings(recorded)
        if finding.cause == "launches"
    )


def test_ops_that_autograd_does_not_record_have_a_price_of_their_own() -> None:
    """200 ops of 8 us are 16 % of a step; 120 of them are the optimizer's, and cost 2 us."""
    recorded = facts(steps(10.0, op=0.008, bare=0.002), ops=200)
    assert launches_of(recorded) == pytest.approx(1.6 / 10.01, rel=1e-3)
    assert launches_of(dataclasses.replace(recorded, bare_ops=120)) == pytest.approx(
        0.88 / 10.01, rel=1e-3
    )


def test_work_inside_of_ops_is_no_launch_whatever_the_ops_are() -> None:
    """No matrix product among them, as in an LSTM: their work leaves 1 ms for the price of ops."""
    recorded = facts(steps(10.0, op=0.008), ops=300, op_s=9.6e-3)
    assert launches_of(recorded) == pytest.approx(2.4 / 10.01, rel=1e-3)
    assert launches_of(dataclasses.replace(recorded, work_s=9e-3)) == pytest.approx(
        1 / 10.01, rel=1e-3
    )


def test_seconds_that_go_with_threads_are_no_launches() -> None:
    """Eight threads on two cores raise the price of an op too: what one thread does not take is theirs."""
    recorded = facts(
        steps(20.0, one_thread=10.0, op=0.12), threads=8, ops=100, product_s=4e-3
    )
    diagnosis = Diagnosis(recorded)
    assert diagnosis.verdict == "too_many_threads"
    shares = {finding.cause: finding.cost for finding in diagnosis.findings}
    assert shares["launches"] == pytest.approx((20 - 4 - 10) / 20.01, abs=0.03)


def test_a_cause_that_every_round_confirms_stands_however_far_rounds_are_spread() -> (
    None
):
    """Threads that wait for cores make the noise; one thread is twice as fast in each round."""
    scales = (1, 4, 1, 5, 1, 4, 6)
    rounds = [
        {"data": 0.0, "sleep": 0.0, "step": 0.02 * each, "one_thread": 0.01 * each}
        for each in scales
    ]
    diagnosis = Diagnosis(Facts(rounds=rounds, threads=8, cores=2))
    assert diagnosis.verdict == "too_many_threads"
    unclear = [
        {**each, "one_thread": 0.02 * scale}
        for each, scale in zip(rounds, scales[::-1], strict=True)
    ]
    assert Diagnosis(Facts(rounds=unclear, threads=8, cores=2)).verdict == "noisy"


def test_a_share_that_a_cause_has_in_each_round_stands_however_far_rounds_are_spread() -> (
    None
):
    """Ops of 5 us where the machine is fast and of 30 where it is slow are a step of 1,000 ops in each round."""
    scales = (1, 4, 1, 5, 1, 4, 6)
    rounds = [
        {"data": 0.0, "sleep": 0.0, "step": 6e-3 * each, "op": 5e-6 * each}
        for each in scales
    ]
    assert Diagnosis(Facts(rounds=rounds, ops=1_000)).verdict == "launches"
    unclear = [{**each, "op": 5e-6} for each in rounds]
    assert Diagnosis(Facts(rounds=unclear, ops=1_000)).verdict == "noisy"


def test_the_gain_without_collections_knows_their_mean_no_better_than_few_rounds_say() -> (
    None
):
    """2 of 3.6 ms by the mean, in one of six rounds or in all of them."""

    def gain_without_garbage(collections: list[float]) -> Gain:
        rounds = [
            {"data": 0.0, "step": 1.6e-3 + seconds, "gc": seconds}
            for seconds in collections
        ]
        (finding,) = (
            each
            for each in causes.findings(Facts(rounds=rounds))
            if each.cause == "garbage"
        )
        assert finding.remedies[0].gain is not None
        return finding.remedies[0].gain

    often = gain_without_garbage([2e-3] * 6)
    seldom = gain_without_garbage([0.0] * 5 + [12e-3])
    assert often.low < 2.25 < often.high
    assert seldom.low < often.low
    assert often.high < seldom.high


def test_large_tables_that_no_experiment_looked_at_are_not_called_healthy() -> None:
    unknown = facts(
        steps(83.2),
        tables=(TABLE,),
        ops=202,
        not_measured={"small_tables": "a round takes 9 s already"},
    )
    diagnosis = Diagnosis(unknown)
    assert diagnosis.verdict == "noisy"
    assert (
        "not known (a round takes 9 s already); give more time (budget_s)"
        in diagnosis.noisy
    )


def test_one_reason_for_several_missing_experiments_is_one_line() -> None:
    missing = {
        "bf16": "a round takes 9 s already",
        "double": "a round takes 9 s already",
        "worker": "no DataLoader",
    }
    page = str(Diagnosis(facts(steps(5.0), not_measured=missing)))
    assert (
        "   bf16, double: a round takes 9 s already\n   worker: no DataLoader" in page
    )


def test_the_remedy_for_a_stream_names_the_loader_of_files() -> None:
    slow = {**steps(5.0), "data": 20.0, "sleep": 0.0}
    for is_stream in (True, False):
        loader = LoaderFacts(kind="DataLoader", dataset="Stream", is_stream=is_stream)
        assert (
            "ChunkLoader(ParquetSource(folder)"
            in str(Diagnosis(facts(slow, loader=loader)))
        ) == is_stream


def test_workers_of_a_generator_are_those_of_a_loader_around_it() -> None:
    made = RECORDED["loader_computes"]
    slept = facts({**steps(2.3), "data": 10.6, "sleep": 10.07}, loader=made.loader)
    for page in (str(Diagnosis(made)), str(Diagnosis(slept))):
        assert "| DataLoader(Batches(), batch_size=None, num_workers=1)" in page
        assert "DataLoader(..." not in page


def test_capturing_takes_longer_with_more_ops() -> None:
    few, many = (
        costs.capture_seconds(facts(steps(5.0), ops=ops)) for ops in (100, 2_000)
    )
    assert many[0] > 4 * few[0]
    assert f"about {few[0]:.0f}" == "about 4"


def test_the_json_holds_what_the_page_says() -> None:
    made = json.loads(Diagnosis(RECORDED["row_python"]).to_json())
    assert made["verdict"] == "row_python"
    assert made["findings"][0]["cause"] == "row_python"
    assert len(made["findings"][0]["remedies"][0]["gain"]) == 2
    assert len(made["facts"]["rounds"]) == len(DRIFT)
    assert {each["name"]: each["helps"] for each in made["answers"]}[
        "loader workers"
    ] == "no"


def test_rules_need_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tests.diagnose.recorded as r; from torchrec_ext.diagnose.report import Diagnosis; "
        "print(Diagnosis(r.HEALTHY).verdict, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["products", "False"]


def test_parts_add_up_to_the_iteration_and_no_line_takes_more_than_its_loader() -> None:
    """Rounds of a busy machine: data is slow in some, the step in others; lines were sampled in a slow moment."""
    rounds = [
        {
            "data": data * 1e-3,
            "sleep": 0.0,
            "step": 2e-3,
            "forward": 1e-3,
            "backward": 0.8e-3,
            "optimizer": 0.2e-3,
        }
        for data in (9.0, 9.0, 90.0)
    ]
    rounds += [
        {**each, "data": 9e-3, "step": 20e-3, "forward": 19e-3} for each in rounds[:2]
    ]
    lines = (LineFacts(name="train.py:5 in __getitem__", phase="data", seconds=0.9),)
    recorded = dataclasses.replace(
        RECORDED["row_python"], rounds=rounds, lines=lines, sampled_s=1.0
    )
    page = str(Diagnosis(recorded))
    whole, *parts = map(float, re.findall(r"(\d[\d.]*) ms", page.partition(";")[0])[:5])
    assert sum(parts) == pytest.approx(whole, rel=0.01)
    cost = next(
        each.cost for each in causes.findings(recorded) if each.cause == "row_python"
    )
    assert f"{cost:.0%} of an iteration is at train.py:5" in page


def test_a_value_that_is_read_after_the_backward_pass_hinders_no_compiler() -> None:
    step = RECORDED["launches"]
    for lines, known in (
        ((), True),
        ((("train.py:31 in step", 1),), True),
        ((("train.py:31 in step", 9),), False),
    ):
        (answer,) = (
            each
            for each in answers(
                dataclasses.replace(step, syncs=1, loss_sync_lines=lines)
            )
            if each.name == "torch.compile"
        )
        assert (answer.gain is not None) == known
        assert ("train.py:31" in answer.why) == bool(lines)
