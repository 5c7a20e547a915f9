"""Diagnosis: the verdict on a training step, as a page on the terminal, as JSON, as HTML and as a Chrome trace."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from torchrec_ext.diagnose.facts import Facts, Gain, RankFacts, paired_gain
from torchrec_ext.diagnose.findings import UNDER, Finding, Remedy
from torchrec_ext.diagnose.rules import costs
from torchrec_ext.diagnose.rules.answers import answers
from torchrec_ext.diagnose.rules.causes import findings, too_noisy
from torchrec_ext.diagnose.rules.exchange import rank_table
from torchrec_ext.drawing.page import (
    Bar,
    Curve,
    Lane,
    card,
    chart,
    gains,
    lanes,
    page,
    paragraph,
    stacked,
    text_table,
)

_WIDTH = 110
_EXPLAINED = 0.8  # share of an iteration that must be explained before nothing is wrong
_HELPS = {
    "yes": "yes",
    "no": "no, under 5 %",
    "perhaps": "perhaps",
    "not known": "not known",
}
_HELD = {
    True: "in the interval",
    False: "outside of the interval",
    None: "nothing was predicted",
}


Compare = Callable[..., list[tuple[float, float]]]
Training = TypeVar("Training")


@dataclass(frozen=True, kw_only=True)
class Realised:
    """The measured gain of a remedy, beside the predicted one.

    Args:
        remedy: name of the remedy.
        predicted: speed-up that was expected; None if none was.
        gain: speed-up that was measured, both ways by turns.
        ratio: the median of the turns.
    """

    remedy: str
    predicted: Gain | None
    gain: Gain
    ratio: float

    @property
    def held(self) -> bool | None:
        """Whether the median lies in the predicted interval; None if nothing was predicted."""
        if self.predicted is None:
            return None
        return self.predicted.low <= self.ratio <= self.predicted.high

    def __str__(self) -> str:
        predicted = _gain(self.predicted)
        return f"{self.remedy}: predicted {predicted}, realised {self.ratio:.3g}x ({self.gain}): {_HELD[self.held]}"


def realised_by(
    turns: Sequence[tuple[float, float]], remedy: Remedy | None
) -> Realised:
    """Returns the gain of a remedy from seconds as it was and with the remedy, by turn."""
    ratios = [old / new for old, new in turns]
    return Realised(
        remedy=remedy.name if remedy else "another step",
        predicted=remedy.gain if remedy else None,
        gain=paired_gain(ratios),
        ratio=statistics.median(ratios),
    )


class Diagnosis:
    """The verdict on a training step: causes of lost time, what will help and what will not.

    Args:
        facts: what was measured.
        compare: times the step as it was and with a remedy; None if nothing can be run any more.
        rank: rank that holds it, of several that measured together. The page of rank 0 is that of all; those of the
            others are empty, so that a program prints it once.

    Attributes:
        findings: causes of lost time, the greatest first; then offers, which change the mathematics.
        answers: what each thing that people try would gain.
        noisy: why there is no verdict; empty if there is one.
        batches: what to train on afterwards; the batches as given, but for an iterator.
        proof: remedies that were measured afterwards, in the order in which they were.
        kept: lines of each remedy that made the step faster, with its ratio.
    """

    def __init__(
        self, facts: Facts, compare: Compare | None = None, rank: int = 0
    ) -> None:
        self.facts = facts
        self._compare = compare
        self._rank = rank
        self.findings = findings(facts)
        self.answers = answers(facts)
        self.noisy = too_noisy(facts) if facts.rounds else "nothing could be measured"
        self.batches: Iterable[Any] = ()
        self.proof: list[Realised] = []
        self.kept: list[tuple[str, float]] = []

    @property
    def verdict(self) -> str:
        """The cause with the largest cost, if that is .15 of an iteration or more.

        Where there is none: ``products`` where matrix products take half of it, else ``healthy``. ``noisy`` where
        nothing can be said, ``step failed`` if the step could not be run, and ``loop failed`` if it raised later.
        """
        for name in ("step", "loop"):
            if name in self.facts.not_measured:
                return f"{name} failed"
        if self.noisy or not self.facts.has("step"):
            return "noisy"
        faults = [
            finding.cause
            for finding in self.findings
            if finding.size in ("large", "medium")
        ]
        if faults:
            return faults[0]
        # The least, because products are the best of many too.
        whole = min(map(self.facts.iteration, self.facts.rounds))
        return "products" if self.facts.product_s > 0.5 * whole else "healthy"

    def to_json(self) -> str:
        """Returns the diagnosis as a JSON object: ``verdict``, ``findings``, ``answers``, ``proof``, ``facts``."""
        values = {
            "verdict": self.verdict,
            "noisy": self.noisy,
            "limit_share": costs.limit_share(self.facts),
            "findings": list(map(_finding_values, self.findings)),
            "answers": list(map(dataclasses.asdict, self.answers)),
            "proof": list(map(dataclasses.asdict, self.proof)),
            "facts": dataclasses.asdict(self.facts),
        }
        return json.dumps(values, default=str)

    def html(self, path: str | Path) -> None:
        """Writes the diagnosis as one self-contained HTML file with pictures.

        Args:
            path: path of the file.

        Raises:
            ValueError: it cannot be written.
        """
        _write(path, _html(self))

    def trace(self, path: str | Path) -> None:
        """Writes a Chrome trace for chrome://tracing or ui.perfetto.dev: an iteration of each round, or of each rank.

        Args:
            path: path of the file.

        Raises:
            ValueError: it cannot be written.
        """
        facts = self.facts
        rows = {f"rank {each.rank}": each.spans for each in facts.ranks}
        if not any(rows.values()):
            # One process has no spans on a common clock, so its rounds stand one after
            # the other.
            names = [
                name
                for name in ("data", "forward", "backward", "optimizer")
                if facts.has(name)
            ]
            spans: list[tuple[str, float, float]] = []
            start = 0.0
            for round_ in facts.rounds:
                for name in names:
                    spans.append((name, start, start + round_[name]))
                    start += round_[name]
            rows = {"this process": spans}
        events: list[dict[str, Any]] = []
        for number, (row, spans_of_row) in enumerate(rows.items()):
            events.append(
                {
                    "ph": "M",
                    "name": "process_name",
                    "pid": number,
                    "tid": 0,
                    "args": {"name": row},
                }
            )
            for name, start, end in spans_of_row:
                # A Chrome trace counts in microseconds.
                span = {
                    "ph": "X",
                    "name": name,
                    "pid": number,
                    "tid": 0,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
                events.append(span)
        _write(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def realised(
        self,
        step: Callable[..., object] | Iterator[Any],
        batches: Iterable[Any] | None = None,
        *,
        remedy: Remedy | str | None = None,
        seconds: float = 10.0,
    ) -> Realised:
        """Measures a remedy beside the step as it was, by turns, and compares its gain with the prediction.

        The remedy's steps are real ones: they train. What the old step does is put back.

        Args:
            step: the step with the remedy, called as the old one; or an iterator, each entry of which is an iteration,
                as of an epoch of :class:`Rows`.
            batches: batches of that step; the old ones if not given.
            remedy: the remedy that it is, or how its name begins; the first of the first finding if not given.
            seconds: seconds that it may take, but five turns at least.

        Raises:
            ValueError: this diagnosis holds no program, or no remedy of that name.
        """
        if self._compare is None:
            raise ValueError(
                "realised: this diagnosis holds no program, only facts; diagnose again in this process"
            )
        remedies = _remedies(self.findings)
        if remedy is not None and not isinstance(remedy, Remedy):
            matches = [each for each in remedies if each.name.startswith(str(remedy))]
            if not matches:
                names = "; ".join(each.name for each in remedies) or "none"
                raise ValueError(
                    f"realised: remedy={remedy!r}: must be how a remedy's name begins: {names}"[
                        :200
                    ]
                )
            remedy = matches[0]
        turns = self._compare(step, batches, seconds)
        if remedy is None and remedies:
            remedy = remedies[0]
        self.proof.append(realised_by(turns, remedy))
        return self.proof[-1]

    def __str__(self) -> str:
        return "\n".join(_page(self)) if self._rank == 0 else ""


def _remedies(findings: Iterable[Finding]) -> list[Remedy]:
    return [remedy for finding in findings for remedy in finding.remedies]


def _finding_values(finding: Finding) -> dict[str, Any]:
    """Returns a finding for the JSON report, without the fields for this process alone."""
    values = dataclasses.asdict(finding)
    for remedy in values["remedies"]:
        for name in ("is_measured", "action", "count"):
            del remedy[name]
    return values


def apply_in_turn(
    diagnosis: Diagnosis,
    training: Training,
    change: Callable[[Training, Remedy], tuple[Training, str] | None],
    compare: Callable[[Training, Training], Sequence[tuple[float, float]]],
    again: Callable[[Training], Diagnosis],
) -> None:
    """Applies remedies with unchanged mathematics in turn, and measures each beside the training before it.

    One that gains is kept, and the others are predicted anew from there. The captured step comes last, since
    experiments need eager steps.

    Args:
        diagnosis: diagnosis of the training, which gets ``proof``, ``kept`` and notes.
        training: the training as it is.
        change: returns it with a remedy, and the lines that make the change; None if a person must write it. It may
            raise ValueError.
        compare: returns seconds of both by turns; it may raise ValueError.
        again: diagnoses it anew.
    """
    names: set[str] = set()  # of remedies that were tried
    notes = [*diagnosis.facts.notes]

    def untried(now: Diagnosis) -> list[Remedy]:
        remedies = []
        for remedy in _remedies(now.findings):
            promises = remedy.gain is not None and remedy.gain.high >= UNDER
            # By name, because a new diagnosis makes new remedies with other gains.
            if remedy.keeps_mathematics and promises and remedy.name not in names:
                remedies.append(remedy)
        return sorted(remedies, key=lambda each: each.is_captured)

    now = diagnosis
    while remedies := untried(now):
        remedy = remedies[0]
        names.add(remedy.name)
        try:
            changed = change(training, remedy)
            if changed is None:
                continue
            realised = realised_by(compare(training, changed[0]), remedy)
        except ValueError as error:
            notes.append(f"{remedy.name} could not be applied: {error}")
            continue
        diagnosis.proof.append(realised)
        # A remedy stays only if even the low end of its interval is no loss.
        if realised.gain.low < 1:
            notes.append(f"{remedy.name} was not kept: it is not sure to gain anything")
            continue
        training, lines = changed
        diagnosis.kept.append((lines, realised.ratio))
        # Predicted anew from the faster training. For the captured step alone a
        # diagnosis is spared.
        if not all(each.is_captured for each in untried(now)):
            now = again(training)
    if not diagnosis.proof:
        notes.append(
            "nothing was applied: no finding has a remedy that keeps the mathematics and needs nobody to write it"
        )
    diagnosis.facts = dataclasses.replace(diagnosis.facts, notes=notes)


def _page(diagnosis: Diagnosis) -> list[str]:
    facts = diagnosis.facts
    lines = [f"why is my training slow? {_headline(diagnosis)}", "", *_times(facts)]
    if facts.ranks:
        lines += ["", *rank_table(facts)]
    if diagnosis.noisy:
        lines += ["", *_wrapped(diagnosis.noisy)]
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += [
            "",
            f"{number}. {finding.title} ({_size_text(finding, ' of an iteration')})",
        ]
        for sentence in finding.evidence:
            lines += _wrapped(sentence, "   ")
        for remedy in finding.remedies:
            text = f"{_gain(remedy.gain):>14}  {remedy.name}: {remedy.basis}; {remedy.changes.value}"
            lines += _wrapped(text, "   ", 19)
            # Lines to paste are never wrapped.
            lines += [f"{'':19}  | {line}" for line in remedy.lines]
    lines += ["", "what people try, and what it gains here"]
    for answer in diagnosis.answers:
        lines += _wrapped(
            f"{answer.name:22} {_gain(answer.gain):>14}  {_HELPS[answer.helps]}: {answer.why}",
            "   ",
            42,
        )
    if diagnosis.proof:
        lines += ["", "what was applied, and what it gained"]
        for realised in diagnosis.proof:
            lines += _wrapped(str(realised), "   ")
    if diagnosis.kept:
        texts, ratios = zip(*diagnosis.kept, strict=True)
        lines += [f"   together {math.prod(ratios):.3g}x as fast:"]
        lines += [f"{'':5}| {line}" for line in "\n".join(texts).splitlines()]
    sentences = [*map(": ".join, _not_measured(facts)), *facts.notes]
    if sentences:
        lines += ["", "not measured, and what else to know"]
        for sentence in sentences:
            lines += _wrapped(sentence, "   ")
    return lines


def _not_measured(facts: Facts) -> list[list[str]]:
    """Returns the names of the missing experiments with their reason, one row for each reason."""
    names: dict[str, list[str]] = {}
    for name, why in facts.not_measured.items():
        names.setdefault(why, []).append(name)
    return [[", ".join(each), why] for why, each in names.items()]


def _size_text(finding: Finding, unit: str = "") -> str:
    return (
        "offer"
        if finding.size == "offer"
        else f"{finding.size}, {finding.cost:.0%}{unit}"
    )


def _headline(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    if diagnosis.verdict == "step failed":
        return "the step could not be run"
    if diagnosis.verdict == "loop failed":
        return f"the loop does not go on: it raised {facts.not_measured['loop']}"
    if diagnosis.verdict == "noisy":
        return "no verdict"
    if diagnosis.verdict not in ("healthy", "products"):
        return diagnosis.findings[0].title
    text = (
        "its matrix products are the step"
        if diagnosis.verdict == "products"
        else "no cause of its own stands out"
    )
    share = costs.explained(facts)
    nothing = "nothing is wrong"
    if share < _EXPLAINED:
        nothing = f"{1 - share:.0%} of an iteration is not explained"
    headline = f"{nothing}, {text}: it runs at {costs.limit_share(facts):.0%} of this machine's limit"
    if facts.layers:
        layers = ", ".join(f"{name} {share:.0%}" for name, share in facts.layers[:3])
        headline += f"; products by layer: {layers}"
    return headline


def _times(facts: Facts) -> list[str]:
    """Returns the parts of an iteration as lines."""
    if not facts.has("data"):
        return []
    parts = [f"{name} {length:.3g} ms" for name, length in _parts(facts).items()]
    limit = costs.limit_share(facts)
    text = (
        f"an iteration takes {_median_iteration(facts) * 1e3:.3g} ms: {', '.join(parts)}; {len(facts.rounds)} rounds "
        f"in {facts.seconds:.0f} s, {facts.threads} thread(s) on {facts.cores} core(s)"
    )
    if facts.ranks:
        text += f", {len(facts.ranks)} ranks"
    if facts.busy is not None and facts.busy >= 0.1:
        text += f", of which others kept {facts.busy:.1f} busy"
    if limit:
        text += (
            f"; this machine's limit (a large product {facts.flops_per_s / 1e9:.0f} GFLOP/s, a large copy "
            f"{facts.bytes_per_s / 1e9:.0f} GB/s) is {limit:.1%} of that"
        )
    return _wrapped(text)


def _gain(gain: Gain | None) -> str:
    return "?" if gain is None else str(gain)


def _wrapped(text: str, indent: str = "", further: int = 0) -> list[str]:
    if indent and not further:
        further = 2
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + " " * further
    )


# ------------------------------------------------------------------------ as a web page


def _write(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written: {error.strerror or error}; choose another file"
        ) from None


def _html(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    summary = paragraph(f"{_headline(diagnosis)}.")
    summary += paragraph(" ".join(_times(facts)), "muted")
    if diagnosis.noisy:
        summary += paragraph(diagnosis.noisy, "warning")
    cards = [
        _finding_card(number, finding)
        for number, finding in enumerate(diagnosis.findings, 1)
    ]
    if facts.has("step"):
        cards.append(card("One iteration", _waterfall(facts)))
    if any(each.spans for each in facts.ranks):
        cards.append(card("Each rank", _rank_lanes(facts.ranks), wide=True))
    if facts.has("step"):
        if facts.product_flops and facts.flops_per_s and facts.bytes_per_s:
            cards.append(card("This machine's limit", _roofline(facts)))
        cards.append(card("Before and after", _before_and_after(diagnosis)))
    bars = gains([(each.name, each.gain) for each in diagnosis.answers])
    rows = [[each.name, _HELPS[each.helps], each.why] for each in diagnosis.answers]
    table = text_table(["", "helps", "why"], rows)
    cards.append(
        card("What people try, and what it gains here", bars, table, wide=True)
    )
    notes = "".join(map(paragraph, facts.notes))
    if missing := _not_measured(facts):
        notes = text_table(["", ""], missing) + notes
    if notes:
        cards.append(card("Not measured, and what else to know", notes))
    return page("Why is my training slow?", summary, cards)


def _finding_card(number: int, finding: Finding) -> str:
    title = f'{number}. {escape(finding.title)} <span class="badge">{_size_text(finding)}</span>'
    items = [f"<li>{escape(sentence)}</li>" for sentence in finding.evidence]
    content = f"<ul>{''.join(items)}</ul>"
    for remedy in finding.remedies:
        lines = escape("\n".join(remedy.lines))
        content += f"<p><strong>{escape(_gain(remedy.gain))}</strong> {escape(remedy.name)}</p><pre>{lines}</pre>"
        content += paragraph(f"{remedy.basis}; {remedy.changes.value}", "muted")
    return card(title, content, wide=True)


def _parts(facts: Facts) -> dict[str, float]:
    """Returns the milliseconds of an iteration's parts, in their order, which add up to the median iteration."""
    parts = {}
    for name in ("data", "forward", "backward", "optimizer", "wait", "exchange"):
        if facts.has(name):
            parts[name] = facts.median(name) * 1e3
    if facts.between:
        parts["between steps"] = facts.mean_between() * 1e3
    # Medians of parts do not add up to that of their sum, if rounds are spread far.
    scale = 1.0
    if facts.has("step"):
        scale = _median_iteration(facts) * 1e3 / max(sum(parts.values()), 1e-9)
    return {name: length * scale for name, length in parts.items()}


def _median_iteration(facts: Facts) -> float:
    """Returns the median seconds of an iteration."""
    return statistics.median(map(facts.iteration, facts.rounds))


def _waterfall(facts: Facts) -> str:
    lengths = _parts(facts)
    rows = []
    for bar in stacked("", lengths).spans:
        rows.append(
            Lane(name=bar.name, spans=[bar], value=f"{lengths[bar.name]:.3g} ms")
        )
    return lanes(
        rows,
        f"medians of {len(facts.rounds)} rounds; an iteration takes {sum(lengths.values()):.3g} ms",
    )


def _rank_lanes(ranks: Iterable[RankFacts]) -> str:
    rows = []
    for each in ranks:
        name = f"rank {each.rank}"
        if each.host:
            name += f" on {each.host}"
        bars = [Bar(*span) for span in each.spans]
        end = max((bar.end for bar in bars), default=0.0)
        rows.append(Lane(name=name, spans=bars, value=f"{1e3 * end:.3g} ms"))
    return lanes(
        rows,
        "one step of all ranks on one clock; waits and exchanges lie inside of what calls them",
    )


def _roofline(facts: Facts) -> str:
    """Draws operations a second over operations for each byte: what this machine can do, and what the step does."""
    # A step without parameters moves nothing, which has no place on a logarithmic axis.
    traffic = max(costs.traffic(facts), 1.0)
    whole = _median_iteration(facts)
    intensity = facts.product_flops / traffic
    speed = facts.product_flops / whole
    ridge = facts.flops_per_s / facts.bytes_per_s
    ends = min(intensity, ridge) / 8, max(intensity, ridge) * 8
    roof = [
        (ends[0], ends[0] * facts.bytes_per_s),
        (ridge, facts.flops_per_s),
        (ends[1], facts.flops_per_s),
    ]
    limit = min(intensity * facts.bytes_per_s, facts.flops_per_s)
    text = f"operations a second; an iteration makes {speed / 1e9:.3g} of the {limit / 1e9:.3g} GFLOP/s possible to it"
    return chart(
        [
            Curve("this machine: a large copy, a large product", roof),
            Curve("an iteration", [(intensity, speed)], marked=True),
            Curve(
                "its products alone",
                [(intensity, facts.product_flops / max(facts.product_s, 1e-9))],
                marked=True,
            ),
        ],
        x="operations for each byte that must move",
        log=True,
        caption=text,
    )


def _before_and_after(diagnosis: Diagnosis) -> str:
    """Draws an iteration as it is, with each first remedy as predicted, and with each applied one as measured."""
    parts = _parts(diagnosis.facts)
    whole = sum(parts.values())
    rows = [stacked("as it is", parts, f"{whole:.3g} ms")]
    measured: dict[str, Lane] = {}
    for realised in diagnosis.proof:
        length = whole / realised.ratio
        measured[realised.remedy] = stacked(
            f"{realised.remedy}, measured", {"measured": length}, f"{length:.3g} ms"
        )
    gains_by_name = {}
    for finding in diagnosis.findings:
        # By name, because two findings may have one first remedy: its lane stands once.
        for remedy in finding.remedies[:1]:
            gains_by_name[remedy.name] = remedy.gain
    for name, gain in gains_by_name.items():
        if gain is not None:
            least = whole / gain.high
            most = whole / gain.low
            expected = [Bar("expected", 0, least), Bar("expected", least, most, True)]
            rows.append(
                Lane(name=name, spans=expected, value=f"{least:.3g} to {most:.3g} ms")
            )
        if name in measured:
            rows.append(measured.pop(name))
    rows += measured.values()
    return lanes(
        rows,
        "milliseconds of an iteration by what each remedy gains alone; pale where it is uncertain",
    )
