"""Facts as diagnoses recorded them, in round figures: one program for each cause, and one without any."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchrec_ext.diagnose.facts import (
    Between,
    CollectiveFacts,
    Facts,
    LineFacts,
    LoaderFacts,
    RankFacts,
)
from torchrec_ext.observe.counts import TableFacts, WholeTableOp

# of a machine, from round to round; the same for all
DRIFT = (1.0, 1.03, 0.98, 1.3, 1.01, 0.99, 1.02, 0.97, 1.0)


def facts(milliseconds: Mapping[str, float], **more: Any) -> Facts:
    """Facts whose rounds have these milliseconds, each round by the machine's drift."""
    usual = {"data": 0.01, "sleep": 0.0, "op": 0.005, "sync": 0.001, **milliseconds}
    rounds = [
        {name: value * 1e-3 * drift for name, value in usual.items()} for drift in DRIFT
    ]
    base = {
        "rows": 256,
        "cores": 2,
        "busy": 0.1,
        "flops_per_s": 8e10,
        "bytes_per_s": 2e10,
        "optimizers": ("Adam",),
    }
    return Facts(rounds=rounds, **{**base, **more})  # type: ignore[arg-type]


def steps(step: float, **more: float) -> dict[str, float]:
    """Milliseconds of a step, and of it changed as one that grows with its rows."""
    usual = {
        "quarter": step * 0.26,
        "double": step * 1.98,
        "quadruple": step * 3.96,
        "bf16": step,
    }
    spans = {"forward": 0.4 * step, "backward": 0.5 * step, "optimizer": 0.1 * step}
    return {"step": step, **usual, **spans, **more}


ROWS = LoaderFacts(
    kind="DataLoader",
    dataset="Interactions",
    row_calls=256,
    row_s=41e-6,
    collate_s=0.4e-3,
    bytes_read=0.0,
)
TABLE = TableFacts(name="user", rows=12_400_000, dim=1, read=1_024)
FIXED = {"quarter": 1.4, "double": 3.1, "quadruple": 5.6}

RECORDED: dict[str, Facts] = {
    "loader_sleeps": facts(
        {**steps(2.3), "data": 10.6, "sleep": 10.07},
        loader=LoaderFacts(kind="DataLoader", dataset="Slow"),
        ops=100,
        worker=((13.0, 11.5), (13.1, 11.4)),
    ),
    "row_python": facts(
        {**steps(3.0, **FIXED), "data": 11.1},
        loader=ROWS,
        ops=202,
        product_s=0.36e-3,
        worker=((14.0, 16.0), (14.2, 15.0), (14.1, 15.5)),
    ),
    "loader_computes": facts(
        {**steps(3.0, **FIXED), "data": 8.0},
        loader=LoaderFacts(kind="iterable", dataset="generator"),
        ops=50,
    ),
    "untouched_rows": facts(
        {
            **steps(83.2, small_tables=4.7),
            "quadruple": 84.0,
            "double": 83.5,
            "quarter": 79.2,
            "optimizer": 78.0,
        },
        tables=(TABLE,),
        parameters=12_400_097,
        ops=202,
        product_s=0.36e-3,
    ),
    "launches": facts(
        {**steps(4.4), "quadruple": 5.3, "double": 4.7, "quarter": 4.2},
        ops=868,
        op_lines=(("model.py:9 in forward", 400),),
        product_s=0.004e-3,
    ),
    "host_syncs": facts(
        {**steps(3.1), "quadruple": 5.1, "double": 4.0},
        ops=1_472,
        syncs=400,
        sync_lines=(("train.py:31 in loss", 400),),
        loss_sync_lines=(("train.py:31 in loss", 400),),
        sync_ops=1_400,
    ),
    "too_many_threads": facts(
        steps(20.8, one_thread=9.8), threads=8, ops=120, product_s=5e-3
    ),
    "too_few_threads": facts(
        steps(40.0, all_threads=22.0), threads=1, ops=60, product_s=36e-3
    ),
    "sequential_towers": facts(
        steps(20.0, all_threads=19.8),
        ops=60,
        product_s=12e-3,
        towers=(("Two.user", 0.45), ("Two.item", 0.4)),
    ),
    "recompilation": facts(steps(40.0), recompiles=9, ops=60, product_s=10e-3),
    "debug_modes": facts(
        steps(9.0, quiet=2.1), ops=100, modes=("anomaly mode",), product_s=1e-3
    ),
    "python_lines": facts(
        steps(22.0),
        ops=60,
        op_s=1.5e-3,
        sampled_s=23e-3,
        lines=(
            LineFacts(
                name="train.py:40 in callback",
                text="requests.post(url, metrics)",
                seconds=20e-3,
            ),
            LineFacts(
                name="train.py:31 in step",
                text="loss = loss_fn(model(x), y)",
                seconds=2e-3,
                ops=9,
                op_s=1.4e-3,
            ),
        ),
    ),
    "whole_tables": facts(
        steps(9.0),
        ops=60,
        whole_tables=(
            WholeTableOp(
                line="model.py:9 in forward",
                rows=60_000,
                read=256,
                seconds=3e-3,
                backward_s=4e-3,
            ),
        ),
    ),
    "double_precision": facts(
        steps(12.0), ops=40, double_s=11e-3, double_line="model.py:9 in forward"
    ),
    "garbage": facts(steps(12.0, gc=5.0), ops=100),
    "between_steps": facts(
        steps(3.2), between=(Between(name="evaluation", seconds=0.2, steps=20),), ops=60
    ),
}
HEALTHY = facts(
    steps(92.0),
    ops=159,
    product_s=88e-3,
    product_flops=6.5e9,
    parameters=1_200_000,
    layers=(("2", 0.8), ("0", 0.2)),
)


def ranks(
    *parts: Mapping[str, float],
    exchange: float = 0.5,
    calls: int = 1,
    kib: float = 66.0,
    **more: Any,
) -> Facts:
    """Facts of ranks that compute so many milliseconds in each span of a step, and wait for the slowest of them.

    Entries of a rank beside its spans are those of :class:`RankFacts`, times in milliseconds.
    """
    spans = ("data", "forward", "backward", "optimizer")
    held = [
        {
            "data": 0.01,
            "forward": 2.0,
            "backward": 2.0,
            "optimizer": 1.0,
            "queue": 0.0,
            **each,
        }
        for each in parts
    ]
    computed = [sum(each[name] for name in spans) for each in held]
    typical = {
        name: sorted(each[name] for each in held)[(len(held) - 1) // 2]
        for name in spans
    }
    local = typical["forward"] + typical["backward"] + typical["optimizer"]
    step = max(computed) + exchange - typical["data"]
    beyond = step - local
    milliseconds = {
        name: value + beyond
        for name, value in steps(local).items()
        if name not in spans
    }
    milliseconds |= {
        **typical,
        "ready": step,
        "exchange": exchange,
        "wait": beyond - exchange,
    }
    made = []
    for rank, each in enumerate(held):
        timed = {name: each[name] for name in (*spans, "queue")}
        timed |= {"wait": max(computed) - computed[rank], "exchange": exchange}
        facts_of = {name: value for name, value in each.items() if name not in timed}
        traced = [
            {name: value * 1e-3 * drift for name, value in timed.items()}
            for drift in DRIFT * 3
        ]
        usual = {
            "cores": (0, 1),
            "send_s": 0.3,
            "alone_s": local,
            "together_s": local,
            **facts_of,
        }
        usual |= {
            name: 1e-3 * usual[name] for name in ("send_s", "alone_s", "together_s")
        }
        made.append(RankFacts(rank=rank, steps=traced, **usual))  # type: ignore[arg-type]
    collective = CollectiveFacts(
        name="all_reduce",
        line="backward",
        span="backward",
        ranks=range(len(held)),
        bytes=[kib * 1024 / calls] * len(held),
        exchange_s=exchange * 1e-3 / calls,
        waits_s=[1e-3 * (max(computed) - each) for each in computed],
    )
    usual_facts = {
        "latency_s": 0.25e-3,
        "link_bytes": 2**18,
        "ops": 60,
        "product_s": 0.8e-3 * local,
    }
    return facts(
        milliseconds,
        ranks=made,
        collectives=[collective] * calls,
        **{**usual_facts, **more},
    )


def rotating() -> Facts:
    """Three ranks, each of which takes 8 ms longer in every third step."""
    recorded = ranks({}, {}, {"forward": 10.0})
    steps_of = [
        [
            dict(recorded.ranks[2 if index % 3 == rank else 0].steps[index])
            for index in range(len(DRIFT) * 3)
        ]
        for rank in range(3)
    ]
    turned = [
        dataclasses.replace(each, steps=steps_of[rank])
        for rank, each in enumerate(recorded.ranks)
    ]
    return dataclasses.replace(recorded, ranks=turned)


MINE = TableFacts(name="mine", rows=1_000_000, dim=64, read=4_096)
HOT = TableFacts(name="hot", rows=1_000_000, dim=64, read=400_000)
# By cause: facts, and the ranks that are named.
ON_RANKS: dict[str, tuple[Facts, tuple[int, ...]]] = {
    "straggler_input": (ranks({}, {"data": 12.0}), (1,)),
    "straggler_forward": (ranks({"forward": 9.0}, {}, {}), (0,)),
    "straggler_backward": (ranks({}, {}, {"backward": 9.0}), (2,)),
    "straggler_optimizer": (ranks({}, {"optimizer": 9.0}), (1,)),
    "slow_rank": (ranks({}, {"forward": 4.0, "backward": 4.0, "optimizer": 2.0}), (1,)),
    "rotating_straggler": (rotating(), (0, 1, 2)),
    "imbalanced_table": (
        ranks(
            {"tables": (MINE,)},
            {"tables": (MINE, HOT), "forward": 6.0, "backward": 6.0},
        ),
        (1,),
    ),
    "uneven_lists": (
        ranks({"ids": 10_000.0, "forward": 6.0, "backward": 6.0}, {"ids": 1_000.0}),
        (0,),
    ),
    "slow_link": (ranks({}, {"send_s": 25.0}, {}, exchange=20.0), (1,)),
    "unmerged_exchange": (ranks({}, {}, exchange=12.0, calls=48), ()),
    "latency": (ranks({}, {}, exchange=30.0, latency_s=30e-3), ()),
    "bandwidth": (
        ranks({"send_s": 3.0}, {"send_s": 3.0}, exchange=60.0, kib=6_000.0),
        (),
    ),
    "oversubscribed": (
        ranks(
            {"queue": 6.0, "cores": (0,), "together_s": 10.0},
            {"queue": 6.0, "cores": (0,), "together_s": 10.0},
            exchange=5.0,
        ),
        (0, 1),
    ),
}
HEALTHY_RANKS = ranks(
    {"forward": 30.0, "backward": 60.0, "optimizer": 4.0},
    {"forward": 30.5, "backward": 59.0, "optimizer": 4.1},
)
