"""TorchRec's model-parallel harness with our sharder: after a step the sharded model predicts as the unsharded one.

TorchRec itself runs it on CUDA, and skips on gloo what fails there.
"""

import copy
import functools
import os
import random
import traceback
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import PoolingType

from tests.contracts import run_ranks
from tests.foreign.torchrec_source import add_tests, needs_source
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import BagSharder

pytestmark = [pytest.mark.slow, needs_source]
KINDS = ("row_wise", "table_row_wise", "table_wise", "column_wise", "data_parallel")
BATCHES = ("equal", "unequal", "per_feature")
# Copied for each case: TorchRec's sharding adds to it.
IN_BACKWARD = {
    "embedding_bags": (torch.optim.SGD, {"lr": 0.01}),
    "embeddings": (torch.optim.SGD, {"lr": 0.2}),
}


class Case(NamedTuple):
    """One call of the harness.

    ``mixed`` gives the tables one sharding type after the other. All but ``per_feature`` have a weighted collection
    beside the other.
    """

    sharding: str
    pooling: str
    batches: str
    world_size: int
    in_backward: bool = False
    quantised: bool = False

    def __str__(self) -> str:
        more = [name for name in ("in_backward", "quantised") if getattr(self, name)]
        return "-".join(
            [
                self.sharding,
                self.pooling,
                self.batches,
                f"{self.world_size}ranks",
                *more,
            ]
        )


CASES = [
    *(
        Case(kind, pooling, sizes, ranks)
        for ranks in (2, 4)
        for kind in (*KINDS, "mixed")
        for pooling in ("SUM", "MEAN")
        for sizes in BATCHES
    ),
    # Not data_parallel: a rank's optimizer would run before its gradient is averaged.
    *(
        Case(kind, pooling, "equal", 2, in_backward=True)
        for kind in KINDS[:4]
        for pooling in ("SUM", "MEAN")
    ),
    *(
        Case(kind, pooling, "unequal", 2, in_backward=True)
        for kind in KINDS[:2]
        for pooling in ("SUM", "MEAN")
    ),
    *(Case(kind, "SUM", "equal", 2, quantised=True) for kind in KINDS[:4]),
]


def run(runtime: Runtime, case: Case, local_size: int) -> None:
    """The harness of one rank; its classes need TorchRec's tests, so they are made here."""
    add_tests()
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.test_utils.emb_sharder import TestEBCSharder
    from torchrec.distributed.test_utils.test_model_parallel import (
        ModelParallelTestShared,
    )
    from torchrec.distributed.test_utils.test_sharding import (
        sharding_single_rank_test_single_process,
    )

    class Sharder(TestEBCSharder, BagSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(KINDS) if case.sharding == "mixed" else [case.sharding]

        def compute_kernels(
            self, sharding_type: str, compute_device_type: str
        ) -> list[str]:
            return ["dense" if sharding_type == "data_parallel" else "fused"]

    class Harness(ModelParallelTestShared):
        def _run_multi_process_test(
            self,
            *,
            callable: Any,  # noqa: A002
            backend: str,
            **kwargs: Any,
        ) -> None:
            assert dist.group.WORLD is not None
            sharding_single_rank_test_single_process(
                pg=dist.group.WORLD,
                device=torch.device("cpu"),
                rank=runtime.rank,
                **kwargs,
            )

    os.environ.update(
        LOCAL_WORLD_SIZE=str(local_size), LOCAL_RANK=str(runtime.rank % local_size)
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    config = (
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
        if case.quantised
        else None
    )
    harness = Harness()
    harness.setUp(backend="gloo")
    names = [*harness.table_names, "weighted_table_0", "weighted_table_1"]
    kinds = {
        name: [KINDS[at % len(KINDS)]] if case.sharding == "mixed" else None
        for at, name in enumerate(names)
    }
    harness._test_sharding(
        sharders=[
            Sharder(
                case.sharding,
                "fused",
                {"learning_rate": 0.1},
                {}
                if config is None
                else get_qcomm_codecs_registry(config, device=torch.device("cpu")),
            )
        ],
        backend="gloo",
        world_size=runtime.world_size,
        local_size=local_size,
        constraints={
            name: ParameterConstraints(sharding_types=kind, min_partition=4)
            for name, kind in kinds.items()
        },
        qcomms_config=config,
        apply_optimizer_in_backward_config=copy.deepcopy(IN_BACKWARD)
        if case.in_backward
        else None,
        variable_batch_size=case.batches == "unequal",
        variable_batch_per_feature=case.batches == "per_feature",
        has_weighted_tables=case.batches != "per_feature",
        pooling=PoolingType[case.pooling],
    )


def errors(runtime: Runtime, cases: list[Case]) -> dict[Case, str]:
    """What the harness says of each case, one after the other on the same ranks; nothing where it passes."""
    errors = {}
    for case in cases:
        try:
            run(runtime, case, 2)
        except Exception:
            errors[case] = traceback.format_exc()
    return errors


@functools.cache
def failures(sharding: str, world_size: int) -> dict[Case, str]:
    """By case the error of a rank."""
    cases = [
        case
        for case in CASES
        if (case.sharding, case.world_size) == (sharding, world_size)
    ]
    ranks = run_ranks(errors, world_size, cases, timeout_s=600)
    return {case: error for errors in ranks for case, error in errors.items()}


def of_upstream(case: Case) -> bool:
    """Returns whether TorchRec cannot: data_parallel with a batch size for each feature (torchrec #1916, #2268)."""
    return case.batches == "per_feature" and case.sharding in ("data_parallel", "mixed")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.xfail(strict=True, reason="TorchRec's own")]
            if of_upstream(case)
            else [],
        )
        for case in CASES
    ],
    ids=str,
)
def test_torchrecs_own_harness_with_our_sharder(case: Case) -> None:
    error = failures(case.sharding, case.world_size).get(case, "")
    assert not error, error
