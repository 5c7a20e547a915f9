"""Diagnosis: the verdict on a training step, as a page on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
import textwrap
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from torchrec_ext.diagnose.costs import ratios_of
from torchrec_ext.diagnose.findings import Facts, Gain, gain_of
from torchrec_ext.diagnose.trials import trials
from torchrec_ext.diagnose.verdicts import findings, too_noisy

_WIDTH = 110
_PARTS = ("data", "model", "optimizer")
_HELPS = {"yes": "yes", "no": "no, under 5 %", "perhaps": "perhaps"}
Compare = Callable[..., list[tuple[float, float]]]


class Diagnosis:
    """The verdict on a training step: causes of lost time, and what each change that was run gains.

    Args:
        facts: what was measured.
        compare: times the step as it was and another one; None if nothing can be run any more.

    Attributes:
        findings: causes of lost time, the greatest first.
        trials: changes that were run, with their gains.
        noisy: why there is no verdict; empty if there is one.
    """

    def __init__(self, facts: Facts, compare: Compare | None = None) -> None:
        self.facts = facts
        self._compare = compare
        self.findings = findings(facts)
        self.trials = trials(facts)
        self.noisy = too_noisy(facts) if facts.rounds else "nothing was measured"

    @property
    def verdict(self) -> str:
        """The cause with the largest cost, if that is .15 of an iteration or more.

        It is ``loader_waits``, ``loader_rows``, ``launches``, ``untouched_rows``, ``host_syncs``, ``threads`` or
        ``your_line``; ``products`` where nothing is wrong, and the step is its own
        work. ``noisy`` where nothing can be said, ``step failed`` if the step could not be run, and ``loop failed`` if
        it raised later.
        """
        for name in ("step", "loop"):
            if name in self.facts.not_measured:
                return f"{name} failed"
        if self.noisy or not self.facts.has("step"):
            return "noisy"
        for finding in self.findings:
            if finding.size in ("large", "medium"):
                return finding.cause
        return "products"

    def realised(
        self,
        step: Callable[..., object] | Any,
        batches: Iterable[Any] | None = None,
        *,
        seconds: float = 10.0,
    ) -> Gain:
        """Returns the speed-up of another step, by turns beside the step as it was.

        Args:
            step: step function that is called as the old one; or an iterator, of which each entry is an iteration. It
                trains for good; what the old step changes is put back.
            batches: its batches; those of the old step if not given. Other batch sizes are compared by row.
            seconds: seconds of the wall clock for the turns.

        Raises:
            ValueError: this diagnosis holds no program.
        """
        if self._compare is None:
            raise ValueError(
                "realised: this diagnosis holds no program, only facts; call why_slow again"
            )
        return gain_of(ratios_of(self._compare(step, batches, seconds)))

    def to_json(self) -> str:
        """Returns the diagnosis as a JSON object: ``verdict``, ``noisy``, ``findings``, ``trials``, ``facts``."""
        values = {
            "verdict": self.verdict,
            "noisy": self.noisy,
            "findings": list(map(dataclasses.asdict, self.findings)),
            "trials": list(map(dataclasses.asdict, self.trials)),
            "facts": dataclasses.asdict(self.facts),
        }
        return json.dumps(values, default=str)

    def __str__(self) -> str:
        return "\n".join(_page(self))


def _page(diagnosis: Diagnosis) -> list[str]:
    facts = diagnosis.facts
    lines = [f"why is my training slow? {_cause(diagnosis)}", *_times(facts)]
    if diagnosis.noisy:
        lines += ["", *_wrapped(diagnosis.noisy)]
    for number, finding in enumerate(diagnosis.findings, 1):
        cost = f"{finding.size}, {finding.cost:.0%} of an iteration"
        lines += ["", f"{number}. {finding.title} ({cost})"]
        for sentence in finding.evidence:
            lines += _wrapped(sentence, "   ")
        for remedy in finding.remedies:
            lines += _wrapped(f"-> {remedy.name}; {remedy.changes.value}", "   ", 3)
            lines += _pasted(remedy.lines)
    if diagnosis.trials:
        lines += ["", "what was tried, and how many times as fast an iteration was"]
    for trial in diagnosis.trials:
        why = ": ".join(filter(None, (_HELPS[trial.gain.helps], trial.why)))
        text = f"{trial.name:24} {trial.gain!s:>22}  {why}; {trial.changes.value}"
        lines += _wrapped(text, "   ", 49)
        if trial.gain.helps == "yes":
            lines += _pasted(trial.lines)
    sentences = [*_not_measured(facts), *facts.notes]
    if sentences:
        lines += ["", "not measured, and what else to know"]
        for sentence in sentences:
            lines += _wrapped(sentence, "   ")
    return lines


def _pasted(lines: Iterable[str]) -> list[str]:
    # Lines to paste are never wrapped.
    return [f"{'':6}| {line}" for line in lines]


def _not_measured(facts: Facts) -> list[str]:
    """Returns a sentence for each reason, with the experiments that are missing for it."""
    names: dict[str, list[str]] = {}
    for name, why in facts.not_measured.items():
        names.setdefault(why, []).append(name)
    return [f"{', '.join(each)}: {why}" for why, each in names.items()]


def _cause(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    if diagnosis.verdict == "step failed":
        return "the step could not be run"
    if diagnosis.verdict == "loop failed":
        return f"the loop does not go on: it raised {facts.not_measured['loop']}"
    if diagnosis.verdict == "noisy":
        return "no verdict"
    if diagnosis.verdict != "products":
        return diagnosis.findings[0].title
    faster = [each.name for each in diagnosis.trials if each.gain.helps == "yes"]
    if faster:
        return f"no cause stands out, and it is faster with: {', '.join(faster)}"
    if facts.has("optimizer"):
        share = facts.share(itemgetter("optimizer"))
        if share > 0.5:
            return f"no cause stands out, and the optimizer takes {share:.0%} of an iteration"
    share = facts.share(lambda _: facts.product_s)
    return f"nothing is wrong, the step is its own work: {share:.0%} of an iteration are matrix products"


def _times(facts: Facts) -> list[str]:
    """Returns the parts of an iteration as lines."""
    if not facts.has("data"):
        return []
    parts = {name: facts.median(name) * 1e3 for name in _PARTS}
    whole = statistics.median(map(facts.iteration, facts.rounds)) * 1e3
    # Medians of parts do not add up to that of their sum, if rounds are spread far.
    scale = whole / max(sum(parts.values()), 1e-9)
    texts = [f"{name} {scale * length:.3g} ms" for name, length in parts.items()]
    text = (
        f"an iteration takes {whole:.3g} ms: {', '.join(texts)}; {len(facts.rounds)} rounds in {facts.seconds:.0f} s, "
        f"{facts.threads} thread(s) on {facts.cores} core(s)"
    )
    if (facts.busy or 0.0) >= 0.1:
        others = "others and the workers" if facts.loader.workers else "others"
        text += f", of which {others} kept {facts.busy:.1f} busy"
    if facts.own_threads > facts.threads:
        text += (
            f". Your program takes {facts.own_threads} threads, which wait for those cores and may make it many times "
            "slower than that: run it with OMP_NUM_THREADS=1 first"
        )
    return ["", *_wrapped(text)]


def _wrapped(text: str, indent: str = "", further: int = 0) -> list[str]:
    if indent and not further:
        further = 2
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + " " * further
    )
