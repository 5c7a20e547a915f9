"""trials(): what each change that was run gains."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torchrec_ext.diagnose.costs import (
    alone_seconds,
    ratios_of,
    variant_gain,
)
from torchrec_ext.diagnose.findings import (
    LEAST,
    Change,
    Facts,
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
    """Returns a row for each change that was run, and none for the others."""
    made: list[Trial] = []

    def add(
        variant: str, name: str, changes: Change, batches: int = 1, **more: Any
    ) -> None:
        if facts.has("data", "step", variant):
            gain = variant_gain(facts, variant, batches)
            made.append(Trial(name=name, gain=gain, changes=changes, **more))

    if facts.has("data", "step", "ready") and facts.share(itemgetter("data")) >= LEAST:
        ready = Trial(
            name="batches ready in time",
            gain=facts.gain(alone_seconds),
            changes=Change.EXACT,
            why="the step without its loader: no loader gains more",
        )
        made.append(ready)
    busy = ""
    if (facts.busy or 0.0) >= 0.1:
        busy = f"while others keep {facts.busy:.1f} cores busy"
    for variant, count in (("one_thread", 1), ("all_threads", facts.cores)):
        name = f"{count} thread(s), not {facts.threads}"
        lines = (f"torch.set_num_threads({count})",)
        add(variant, name, Change.ROUNDING, why=busy, lines=lines)
    why = "by row; the learning rate must follow"
    add("quadruple", "4 times the batch", Change.OTHER, 4, why=why)
    add("bf16", "bf16 autocast", Change.OTHER, lines=_BF16)
    why = "an experiment: the optimizer leaves tables alone of which a step reads few rows"
    add("still_tables", "large tables not moved", Change.OTHER, why=why)
    if facts.captured:
        captured = Trial(
            name="the step captured by adopt",
            gain=gain_of(ratios_of(facts.captured)),
            changes=Change.ROUNDING,
            why="by turns beside the step as it is",
            lines=ADOPT,
        )
        made.append(captured)
    return tuple(made)
