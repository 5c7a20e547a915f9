"""Facts as diagnoses recorded them, in round figures: one program for each verdict, and one without a fault."""

from collections.abc import Mapping
from typing import Any

from torchrec_ext.diagnose.findings import (
    Facts,
    LineFacts,
    LoaderFacts,
    TableFacts,
)

# of a machine, from round to round; the same for all
DRIFT = (1.0, 1.03, 0.98, 1.3, 1.01, 0.99, 1.02, 0.97, 1.0)


def facts(milliseconds: Mapping[str, float], **more: Any) -> Facts:
    """Facts whose rounds have these milliseconds, each round by the machine's drift."""
    usual = {"data": 0.01, "sleep": 0.0, "op": 0.005, "sync": 0.001, **milliseconds}
    rounds = [
        {name: value * 1e-3 * drift for name, value in usual.items()} for drift in DRIFT
    ]
    base = {
        "cores": 2,
        "busy": 0.1,
        "optimizers": ("Adam",),
    }
    return Facts(rounds=rounds, **{**base, **more})  # type: ignore[arg-type]


def steps(step: float, **more: float) -> dict[str, float]:
    """Milliseconds of a step, and of it changed as one that grows with its rows."""
    usual = {"quadruple": step * 3.96, "bf16": step}
    spans = {"model": 0.9 * step, "optimizer": 0.1 * step}
    return {"step": step, **usual, **spans, **more}


ROWS = LoaderFacts(
    dataset="Interactions",
    row_calls=256,
    row_s=41e-6,
    collate_s=0.4e-3,
)
TABLE = TableFacts(name="user", rows=12_400_000, dim=1, read=1_024)

RECORDED: dict[str, Facts] = {
    "loader_waits": facts(
        {**steps(2.3, ready=2.3), "data": 10.6, "sleep": 10.07},
        loader=LoaderFacts(dataset="Slow"),
        ops=100,
    ),
    "loader_rows": facts(
        {**steps(3.0, quadruple=5.6), "data": 11.1},
        loader=ROWS,
        ops=202,
        product_s=0.36e-3,
    ),
    "untouched_rows": facts(
        {**steps(83.2, still_tables=4.7, quadruple=84.0), "optimizer": 78.0},
        tables=(TABLE,),
        ops=202,
        product_s=0.36e-3,
    ),
    "launches": facts(
        steps(4.4, quadruple=5.3),
        ops=868,
        op_lines=(("model.py:9 in forward", 400),),
        product_s=0.004e-3,
    ),
    "host_syncs": facts(
        steps(3.1, quadruple=5.1),
        ops=1_472,
        syncs=400,
        sync_lines=(("train.py:31 in loss", 400),),
        sync_ops=1_400,
    ),
    "threads": facts(steps(20.8, one_thread=9.8), threads=8, ops=120, product_s=5e-3),
    "your_line": facts(
        steps(22.0),
        ops=60,
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
}
HEALTHY = facts(steps(92.0), ops=159, product_s=88e-3)
