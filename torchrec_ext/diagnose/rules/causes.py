"""RULES, and from facts to findings: the causes of lost time, ranked by their cost; or why there is no verdict."""

from __future__ import annotations

from collections.abc import Callable

from torchrec_ext.diagnose.facts import Facts
from torchrec_ext.diagnose.findings import LEAST, MEDIUM, UNDER, Finding, in_ms
from torchrec_ext.diagnose.rules.cores import (
    between_steps,
    precision,
    recompilation,
    sequential_towers,
    small_batch,
    too_few_threads,
    too_many_threads,
)
from torchrec_ext.diagnose.rules.exchange import (
    bandwidth,
    latency,
    oversubscribed,
    slow_link,
    unmerged_exchange,
)
from torchrec_ext.diagnose.rules.loader import (
    loader_computes,
    loader_sleeps,
    row_python,
)
from torchrec_ext.diagnose.rules.ranks import (
    imbalanced_table,
    rotating_straggler,
    slow_rank,
    straggler_backward,
    straggler_forward,
    straggler_input,
    straggler_optimizer,
    uneven_lists,
)
from torchrec_ext.diagnose.rules.step import (
    all_items,
    debug_modes,
    double_precision,
    garbage,
    host_syncs,
    launches,
    python_lines,
    untouched_rows,
    whole_tables,
)

NOISY = 0.6  # spread of iterations above which there is no verdict
RULES: dict[str, Callable[[Facts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        loader_sleeps,
        row_python,
        loader_computes,
        untouched_rows,
        launches,
        host_syncs,
        debug_modes,
        python_lines,
        whole_tables,
        double_precision,
        garbage,
        too_many_threads,
        too_few_threads,
        sequential_towers,
        recompilation,
        between_steps,
        all_items,
        small_batch,
        precision,
    )
}
RANK_RULES: dict[str, Callable[[Facts], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        straggler_input,
        straggler_forward,
        straggler_backward,
        straggler_optimizer,
        slow_rank,
        rotating_straggler,
        imbalanced_table,
        uneven_lists,
        slow_link,
        unmerged_exchange,
        latency,
        bandwidth,
        oversubscribed,
    )
}


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Returns the findings of at least a twentieth of an iteration, the largest first, offers last."""
    every = [rule(facts) for rule in RULES.values()]
    every += rank_findings(facts)
    costly = [
        finding for finding in every if finding is not None and finding.cost >= LEAST
    ]
    # Offers come last whatever they gain: they change what is learned.
    # A debugging mode comes first: it lengthens what the other causes are measured by.
    return tuple(
        sorted(
            costly,
            key=lambda each: (
                each.size == "offer",
                each.cause != "debug_modes",
                -each.cost,
            ),
        )
    )


def too_noisy(facts: Facts) -> str:
    """Returns why these facts carry no verdict; empty if they do.

    Where rounds are spread far, a cause stands if the ratios within rounds still say that a remedy gains, or that it
    takes a share in each of them: threads that want more cores than there are make noise themselves.
    """
    faults = [
        finding for finding in findings(facts) if finding.size in ("large", "medium")
    ]
    if (
        facts.tables
        and not facts.has("small_tables")
        and not any(finding.size == "large" for finding in faults)
    ):
        why = facts.not_measured.get("small_tables", "not measured")
        return f"no verdict: whether rows that are not read cost time is not known ({why}); give more time (budget_s)"
    is_certain = False
    for finding in faults:
        # A share is a ratio within a round, and what slows the machine slows both sides
        # of it.
        if finding.size == "large" and finding.least >= MEDIUM:
            is_certain = True
        for remedy in finding.remedies:
            if (
                remedy.is_measured
                and remedy.gain is not None
                and remedy.gain.low >= UNDER
            ):
                is_certain = True
    if facts.spread <= NOISY or (is_certain and len(facts.rounds) >= 4):
        return ""
    times = sorted(map(facts.iteration, facts.rounds))
    if len(times) < 4:
        return f"too few rounds for a verdict: {len(times)} of 4; give more time (budget_s)"
    return (
        f"too noisy for a verdict: the middle half of {len(times)} rounds is spread over {facts.spread:.0%} of the "
        f"median iteration, {in_ms(times[0])} to {in_ms(times[-1])}; measure again on a machine that does less else"
    )


def rank_findings(facts: Facts) -> list[Finding]:
    """Returns the findings about several ranks; none for one process."""
    if not facts.has_ranks or not facts.rounds:
        return []
    findings = {cause: rule(facts) for cause, rule in RANK_RULES.items()}
    shared = findings["oversubscribed"]
    if shared is not None and shared.cost >= MEDIUM:
        # An exchange between processes that wait for a core is slow by that.
        del findings["latency"], findings["unmerged_exchange"]
    return [finding for finding in findings.values() if finding is not None]
