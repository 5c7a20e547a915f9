"""A diagnosis as a web page, seen in Chromium, and as a Chrome trace; and remedies that are applied in turn."""

import itertools
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tests.browser import DESK, colours, needs_chromium, shown
from tests.diagnose.recorded import HEALTHY, RECORDED
from torchrec_ext.diagnose import Diagnosis
from torchrec_ext.diagnose.findings import Action, Change, Finding, Remedy
from torchrec_ext.diagnose.report import apply_in_turn, realised_by


def written(diagnosis: Diagnosis, folder: Path) -> str:
    diagnosis.html(folder / "diagnosis.html")
    return (folder / "diagnosis.html").read_text()


@pytest.mark.parametrize("name", [*RECORDED, "healthy"])
def test_each_finding_stands_in_the_page_in_its_order_with_every_line_to_paste(
    name: str, tmp_path: Path
) -> None:
    diagnosis = Diagnosis(RECORDED.get(name, HEALTHY))
    text = written(diagnosis, tmp_path)
    assert re.search(r"<script|<link|src=|href=|url\(|@import|https?:", text) is None
    places = [
        text.index(f"{number}. ") for number, _ in enumerate(diagnosis.findings, 1)
    ]
    assert places == sorted(places)
    for finding in diagnosis.findings:
        for remedy in finding.remedies:
            assert all(escape(line) in text for line in remedy.lines)


@needs_chromium
def test_a_phone_shows_the_findings_on_top_and_the_pictures_to_scale(
    tmp_path: Path,
) -> None:
    diagnosis = Diagnosis(RECORDED["row_python"])
    diagnosis.proof = [
        realised_by([(14.0, 7.0)] * 5, diagnosis.findings[0].remedies[0])
    ]
    text = written(diagnosis, tmp_path)
    seen = shown(text, tmp_path)
    assert (seen.overflow, seen.outside) == (0, 0)
    order = [
        seen.text.index(words)
        for words in (
            "Why is my training slow?",
            "1. the Dataset",
            "One iteration",
            "Before",
        )
    ]
    assert order == sorted(order)
    for words in (
        "Rows.of",
        "This machine",
        "What people try",
        "loader workers",
        "no, under 5 %",
    ):
        assert words in seen.text or words == "This machine", words
    facts = diagnosis.facts
    for first, second in itertools.pairwise(
        ("data", "forward", "backward", "optimizer")
    ):
        ratio = facts.median(first) / facts.median(second)
        assert seen.width(first, first) / seen.width(second, second) == pytest.approx(
            ratio, rel=0.02
        )
    name = diagnosis.findings[0].remedies[0].name
    whole = sum(bar["width"] for bar in seen.bars if bar["row"] == "as it is")
    assert seen.width(f"{name}, measured", "measured") == pytest.approx(
        whole / 2, rel=0.02
    )
    assert shown(text, tmp_path, width=DESK).overflow == 0


@needs_chromium
def test_the_roofline_of_a_healthy_step_is_drawn_and_the_page_is_not_blank(
    tmp_path: Path,
) -> None:
    text = written(Diagnosis(HEALTHY), tmp_path)
    assert "This machine" in shown(text, tmp_path, dark=True).text
    drawn = colours(text, tmp_path)
    assert drawn["#1f5fd0"] > 300
    assert drawn["#ffffff"] > 50_000


def test_a_trace_has_each_rounds_parts_one_after_the_other(tmp_path: Path) -> None:
    facts = RECORDED["row_python"]
    Diagnosis(facts).trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == [
        "data",
        "forward",
        "backward",
        "optimizer",
    ] * len(facts.rounds)
    for before, after in itertools.pairwise(spans):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert spans[0]["dur"] == pytest.approx(facts.rounds[0]["data"] * 1e6)


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"nowhere/page.html: cannot be written: No such file or directory; choose an",
    ):
        Diagnosis(HEALTHY).html(tmp_path / "nowhere" / "page.html")


# ---------------------------------------------------------------------- applied in turn


def machine(*causes: str) -> Diagnosis:
    """A diagnosis with a finding for each cause, whose remedy doubles the speed or, for a dud, does nothing."""
    diagnosis = Diagnosis(RECORDED["row_python"])
    predicted = RECORDED["row_python"].gain(
        lambda each: (each["data"] + each["step"]) / 2
    )
    diagnosis.findings = tuple(
        Finding(
            cause=cause, title=cause, evidence=(), cost=0.5, size="large",
            remedies=(
                Remedy(
                    name=cause, lines=(f"--set {cause}",), gain=predicted, basis="made up",
                    changes=Change.BATCH if cause == "batch" else Change.EXACT,
                    action=Action.CAPTURE if cause == "captured" else None,
                ),
            ),
        )
        for cause in causes
    )  # fmt: skip
    return diagnosis


def applied(diagnosis: Diagnosis) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """What was diagnosed again, and what was trained in the end, as the remedies that were kept."""
    again: list[tuple[str, ...]] = []
    compared: list[tuple[Any, Any]] = []

    def change(
        given: tuple[str, ...], remedy: Remedy
    ) -> tuple[tuple[str, ...], str] | None:
        if remedy.name == "by hand":
            return None
        if remedy.name == "impossible":
            raise ValueError("there is no such kernel")
        return (*given, remedy.name), remedy.lines[0]

    def seconds(given: tuple[str, ...]) -> float:
        return 8.0 / 2 ** sum(name != "dud" for name in given)

    def compare(
        before: tuple[str, ...], after: tuple[str, ...]
    ) -> list[tuple[float, float]]:
        compared.append((before, after))
        return [(seconds(before), seconds(after))] * 5

    def diagnose(given: tuple[str, ...]) -> Diagnosis:
        again.append(given)
        return machine(
            *[each.cause for each in diagnosis.findings if each.cause not in given]
        )

    apply_in_turn(diagnosis, (), change, compare, diagnose)
    return again, compared[-1][1] if compared else ()


def test_remedies_are_applied_on_top_of_each_other_and_the_captured_step_comes_last() -> (
    None
):
    diagnosis = machine(
        "captured", "first", "dud", "batch", "by hand", "impossible", "second"
    )
    again, last = applied(diagnosis)
    assert [each.remedy for each in diagnosis.proof] == [
        "first",
        "dud",
        "second",
        "captured",
    ]
    assert last == ("first", "second", "captured"), (
        "the dud is not kept, and what changes the mathematics is not applied"
    )
    assert [text for text, _ in diagnosis.kept] == [
        "--set first",
        "--set second",
        "--set captured",
    ]
    assert again == [("first",)], (
        "predicted anew only where something is left to apply that needs it"
    )
    assert all(each.held for each in diagnosis.proof if each.remedy != "dud")
    page = str(diagnosis)
    assert "together 8x as fast:" in page
    assert "dud was not kept" in page
    assert "impossible could not be applied: there is no such kernel" in " ".join(
        page.split()
    )
    assert [each["remedy"] for each in json.loads(diagnosis.to_json())["proof"]] == [
        each.remedy for each in diagnosis.proof
    ]


def test_nothing_that_changes_the_mathematics_is_applied() -> None:
    diagnosis = machine("batch")
    assert applied(diagnosis) == ([], ())
    assert diagnosis.proof == []
    assert "nothing was applied" in " ".join(str(diagnosis).split())


def test_what_a_remedy_changes_says_whether_it_keeps_the_mathematics() -> None:
    remedies = [
        remedy
        for facts in [*RECORDED.values(), HEALTHY]
        for finding in Diagnosis(facts).findings
        for remedy in finding.remedies
    ]
    changing = {remedy.name for remedy in remedies if not remedy.keeps_mathematics}
    assert {
        "2 times the batch",
        "4 times the batch",
        "SparseAdam on tables with sparse=True",
    } <= changing
    assert not any(
        name.startswith(("adopt", "one thread", "DataLoader", "Rows.of"))
        for name in changing
    )
    assert {each.changes for each in remedies if each.name == "one thread"} == {
        "the same but for rounding"
    }
