"""A page's pictures: to scale in a browser, on a phone, light and dark; and a run's page, from its records."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.browser import DESK, PHONE, colours, needs_chromium, shown
from torchrec_ext.drawing.page import (
    Bar,
    Curve,
    Lane,
    card,
    chart,
    gains,
    lanes,
    page,
    stacked,
)
from torchrec_ext.train.report.progress import (
    RunFacts,
    best_evaluation,
    conclusion,
    rank_shares,
    run_page,
    time_shares,
)


def record(
    step: int, *waits: tuple[float, float], seconds: float = 1.0, **more: Any
) -> dict[str, Any]:
    """A record of a window of some seconds; each rank's shares of waits for batches and in collectives."""
    of_ranks = (
        {"ranks_wait": sum(ranks for _, ranks in waits) / len(waits), "waits": waits}
        if len(waits) > 1
        else {}
    )
    usual = {
        "kind": "train",
        "epoch": 1,
        "step": step,
        "loss": 1 / step,
        "rows": 100,
        "rows_per_s": 100 / seconds,
    }
    return {**usual, "data_wait": max(data for data, _ in waits), **of_ranks, **more}


TWO_RANKS = [
    record(10, (0.1, 0.4), (0.5, 0.0)),
    record(20, (0.3, 0.2), (0.1, 0.4), seconds=3.0),
]
EVALUATED = {"kind": "eval", "epoch": 1, "step": 20, "auc": 0.7}
PLAN = [("user<b>", {0: 3 * 2.0**20, 1: 2.0**20}), ("item", {1: 2.0**20})]
FACTS = RunFacts(
    title="two_tower on <planted>",
    notes=["50% of the steps' time went to waiting for batches"],
    plan=PLAN,
    memory=[400.0, 200.0],
    outside=0.25,
    test={"this model": {"auc": 0.71}, "popularity": {"auc": 0.5}},
)


def test_shares_are_of_the_seconds_that_each_record_took() -> None:
    assert rank_shares(TWO_RANKS) == [
        (pytest.approx(0.25), pytest.approx(0.25)),
        (0.2, pytest.approx(0.3)),
    ]
    shares = time_shares([*TWO_RANKS, EVALUATED])
    assert shares == {
        "data": pytest.approx(0.225),
        "ranks": pytest.approx(0.275),
        "compute": pytest.approx(0.5),
    }
    assert time_shares([record(10, (0.2, 0)), record(20, (0.6, 0), seconds=3)])[
        "data"
    ] == pytest.approx(0.5)


def test_a_run_that_went_on_with_other_ranks_has_shares_of_all_and_names_no_rank() -> (
    None
):
    records = [*TWO_RANKS, record(30, (0.1, 0.1), (0.1, 0.1), (0.1, 0.1))]
    assert rank_shares(records) == []
    assert time_shares(records)["ranks"] == pytest.approx((0.2 + 3 * 0.3 + 0.1) / 5)
    assert "Shares of time" in run_page(records, RunFacts(), {})


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=6))
def test_a_bar_is_as_long_as_its_figure(lengths: list[float]) -> None:
    text = lanes(
        [stacked("all", {str(number): length for number, length in enumerate(lengths)})]
    )
    widths = [
        float(width) for width in re.findall(r'"left: [\d.]+%; width: ([\d.]+)%', text)
    ]
    assert sorted(widths) == pytest.approx(
        sorted(100 * each / sum(lengths) for each in lengths), abs=0.001
    )


@given(
    st.lists(
        st.tuples(st.floats(-1e9, 1e9), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=30,
    )
)
def test_no_figures_make_a_chart_fail_and_all_points_lie_inside_of_it(
    points: list[tuple[float, float]],
) -> None:
    made = chart([Curve("a", points, marked=True)], x="step")
    for x, y in re.findall(
        r'<circle cx="([-\d.]+|nan|inf)" cy="([-\d.]+|nan|inf)"', made
    ):
        assert 0 <= float(x) <= 360
        assert 0 <= float(y) <= 180


def test_a_run_without_any_step_has_a_page() -> None:
    assert "0 steps" in run_page([], RunFacts(), {})
    diverged = run_page(
        [
            record(5, (0, 0), loss=float("nan")),
            {"kind": "error", "step": 6, "message": "nan!"},
        ],
        FACTS,
        {},
    )
    assert "nan!" in diverged


def test_records_that_know_no_waits_show_no_share_of_them() -> None:
    unknown = {
        name: value for name, value in record(5, (0, 0)).items() if name != "data_wait"
    }
    assert "waiting for data" not in run_page([unknown], RunFacts(), {})
    assert "rows a second" in run_page([unknown], RunFacts(), {})


def test_a_page_asks_for_nothing_outside_of_itself() -> None:
    text = run_page([*TWO_RANKS, EVALUATED], FACTS, {"auc": 0.5})
    assert re.search(r"<script|<link|src=|href=|url\(|@import|https?:", text) is None
    assert "two_tower on &lt;planted&gt;" in text
    assert "user&lt;b&gt;" in text


@needs_chromium
def test_a_run_is_shown_on_a_phone_with_its_plan_to_scale(tmp_path: Path) -> None:
    text = run_page([*TWO_RANKS, EVALUATED], FACTS, {"auc": 0.5})
    seen = shown(text, tmp_path)
    assert (seen.overflow, seen.outside) == (0, 0)
    for words in (
        "Training of two_tower on <planted>",
        "waiting for batches",
        "training loss",
        "auc",
        "0.7100",
        "user<b>",
    ):
        assert words in seen.text
    assert "25.0%, 25.0%, 50.0%" in seen.text
    assert seen.pictures == 1 + 1 + 2 + 1 + 2 + 2, (
        "loss, auc, shares of two ranks, rows, plan and memory of two"
    )
    mib = seen.width("rank 1", "item")
    assert seen.width("rank 0", "user<b>") == pytest.approx(3 * mib, rel=0.02)
    assert seen.width("rank 1", "user<b>") == pytest.approx(mib, rel=0.02)
    assert seen.width("rank 0", "peak memory") == pytest.approx(
        2 * seen.width("rank 1", "peak memory"), rel=0.02
    )


@needs_chromium
def test_a_page_is_light_or_dark_as_the_screen_asks(tmp_path: Path) -> None:
    text = page(
        "Bars",
        "",
        [
            card(
                "All",
                lanes([Lane(name="a", spans=[Bar("b", 0, 1)])]),
                gains([("c", (1, 2))]),
            )
        ],
    )
    light, dark = (
        colours(text, tmp_path, dark=dark, height=500) for dark in (False, True)
    )
    assert max(light, key=lambda each: light[each]) == "#f3f5f9"
    assert max(dark, key=lambda each: dark[each]) == "#10151d"
    assert light["#1f5fd0"] > 500, "the bars"
    assert dark["#82adff"] > 500
    assert (
        shown(text, tmp_path, width=DESK).overflow
        == shown(text, tmp_path, width=PHONE).overflow
        == 0
    )


def test_a_run_begins_with_its_conclusion_then_the_test_table_settings_and_commands() -> (
    None
):
    facts = RunFacts(
        test={
            "this model": {"hr@10": 0.2495},
            "popularity": {"hr@10": 0.048},
            "ease": {"hr@10": 0.259},
        },
        settings={"train.epochs": "4"},
        commands={"Serve it:": "torchx run rec.serve.http"},
    )
    records = [
        record(10, (0.1, 0.1)),
        {"kind": "eval", "epoch": 4, "step": 10, "hr@10": 0.26},
    ]
    text = run_page(records, facts, {})
    conclusion = (
        "hr@10 0.2495: 5.2x popularity 0.0480, below ease 0.2590; best at epoch 4"
    )
    places = [
        text.index(part)
        for part in (conclusion, "Test rows", "Settings", "Next", "<h2>Loss")
    ]
    assert places == sorted(places)


def test_the_best_evaluation_of_a_figure_that_falls_is_the_lowest() -> None:
    losses = [0.5, 0.4, 0.45]
    records = [
        {"kind": "eval", "epoch": i, "step": i, "log_loss": loss}
        for i, loss in enumerate(losses, 1)
    ]
    best = best_evaluation(records)
    assert best is not None
    assert best["epoch"] == 2
    facts = {"this model": {"log_loss": 0.4}, "the same for all": {"log_loss": 0.6}}
    assert (
        conclusion(records, facts)
        == "log_loss 0.4000: better than the same for all 0.6000; best at epoch 2"
    )


@needs_chromium
def test_a_wide_test_table_is_whole_on_a_desk(tmp_path: Path) -> None:
    names = ["this model", "popularity", "ease", "als", "another baseline"]
    text = run_page(
        [], RunFacts(test={name: {"hr@10": 0.1, "ndcg@10": 0.1} for name in names}), {}
    )
    assert shown(text, tmp_path, width=1280).cut_tables == 0
