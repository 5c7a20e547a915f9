"""trials(): what each change that was run gains."""

from __future__ import annotations

from operator import itemgetter

from torchrec_ext.diagnose.costs import (
    alone_seconds,
    changed_seconds,
    ratios_of,
    variant_gain,
)
from torchrec_ext.diagnose.findings import (
    LEAST,
    Change,
    Facts,
    Gain,
    Trial,
    gain_of,
)

ADOPT = (
    "from torchrec_ext.adopt import adopt",
    "step = adopt(model, optimizer, loss)",
)
_BF16 = (
    "with torch.autocast('cpu', torch.bfloat16): value = loss(*next(iter(loader)))",
)


def trials(facts: Facts) -> tuple[Trial, ...]:
    """Returns a row for each change that was run; what was not run has none."""
    made: list[Trial] = []

    def add(
        name: str,
        gain: Gain,
        changes: Change,
        why: str = "",
        lines: tuple[str, ...] = (),
    ) -> None:
        made.append(Trial(name=name, gain=gain, changes=changes, why=why, lines=lines))

    def add_variant(
        variant: str,
        name: str,
        changes: Change,
        why: str = "",
        lines: tuple[str, ...] = (),
    ) -> None:
        if facts.has("data", "step", variant):
            add(name, variant_gain(facts, variant), changes, why, lines)

    if facts.has("data", "step", "ready") and facts.share(itemgetter("data")) >= LEAST:
        why = "the step without its loader: no loader gains more"
        add("batches ready in time", facts.gain(alone_seconds), Change.EXACT, why)
    busy = ""
    if facts.busy is not None and facts.busy >= 0.1:
        busy = f"while others keep {facts.busy:.1f} cores busy"
    for variant, count in (("one_thread", 1), ("all_threads", facts.cores)):
        name = f"{count} thread(s), not {facts.threads}"
        lines = (f"torch.set_num_threads({count})",)
        add_variant(variant, name, Change.ROUNDING, busy, lines)
    if facts.has("data", "step", "quadruple"):
        gain = facts.gain(
            lambda each: each["data"] + changed_seconds(each, "quadruple") / 4
        )
        why = "by row; the learning rate must follow"
        add("4 times the batch", gain, Change.OTHER, why)
    add_variant("bf16", "bf16 autocast", Change.OTHER, lines=_BF16)
    why = "an experiment: the optimizer leaves tables alone of which a step reads few rows"
    add_variant("still_tables", "large tables not moved", Change.OTHER, why)
    if facts.captured:
        gain = gain_of(ratios_of(facts.captured))
        why = "by turns beside the step as it is"
        add("the step captured by adopt", gain, Change.ROUNDING, why, ADOPT)
    return tuple(made)
