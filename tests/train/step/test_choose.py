"""One line and one record say whether steps are captured, why, and what a step of each way takes."""

from __future__ import annotations

import re
from typing import Any

from tests.capture.runs import Few
from tests.contracts import run_ranks
from tests.examples import META, small_model
from torchrec_ext.capture import policy
from torchrec_ext.capture.executors import as_it_is
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps

MS = r"[\d.,]+ ms"


def records(
    runtime: Runtime,
    *,
    pays: float = 60.0,
    count: int = 40,
    sync: SyncConfig | None = None,
    **options: Any,
) -> list[Any]:
    """The records of kind ``steps``."""
    policy.PAYS_S, steps.engine_for = {"cpu": pays}, lambda _: (as_it_is, "capturing")
    model = small_model(META)
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding="data_parallel")
    )
    logged: list[Any] = []
    train(
        parallel,
        optimizer,
        Few([24] * count),
        runtime,
        TrainConfig(epochs=1, **options),
        sync=sync,
        log=logged.append,
    )
    return [record for record in logged if record["kind"] == "steps"]


def by_setting(runtime: Runtime) -> dict[str, list[Any]]:
    local = SyncConfig(mode="local_sgd", every=100)
    results = {
        "off": records(runtime, compile="off"),
        "auto": records(runtime, compile="auto"),
        "captured": records(runtime, compile="auto", pays=0.0, sync=local),
        "required": records(runtime, compile="require", sync=local),
    }
    if runtime.world_size > 1:
        results["waiting"] = records(runtime, compile="auto", pays=0.0)
    return results


def check(results: dict[str, list[Any]], patterns: dict[str, str]) -> None:
    for name, pattern in patterns.items():
        (record,) = results[name]
        assert re.fullmatch(pattern, record["message"]), (name, record["message"])
        assert (
            record["captured"]
            == ("captured_ms" in record)
            == record["message"].startswith("captured")
        )
        assert record["eager_ms"] > 0
        assert {"epoch", "step"} <= record.keys()


ALWAYS = {
    "off": rf"eager: train\.compile=off; {MS} a step",
}
ALONE = {
    "auto": rf"eager: capturing pays from [\d,]+ steps on, and 28 are left; {MS} a step",
    "captured": rf"captured since step 13: {MS} a step, eager {MS}",
    "required": rf"captured since step 3: {MS} a step, eager {MS}",
}


def test_how_steps_go_is_said_once_with_its_reason_and_what_a_step_takes() -> None:
    (results,) = run_ranks(by_setting, 1)
    check(results, {**ALWAYS, **ALONE})


def test_on_two_ranks_rank_0_tells_it() -> None:
    first, second = run_ranks(by_setting, 2)
    waiting = rf"eager: 2 ranks wait for each other in every step; for .*-j 1x1.*; {MS} a step"
    check(first, {**ALWAYS, "waiting": waiting, "auto": waiting})
    assert all(logged == [] for logged in second.values())
