"""Ranks take equally many steps, and evaluations find them equal, under every mode of exchange."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import run_ranks
from tests.distributed.test_sync import ADAM, made, whole
from tests.train.test_loop import Batches
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig, UnevenStepsError
from torchrec_ext.train.loop import TrainConfig, exactly, train


def all_laws(runtime: Runtime) -> dict[str, Any]:
    return {
        "evaluated": evaluated(runtime),
        "uneven": uneven(runtime),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(all_laws, 2)


def evaluated(runtime: Runtime) -> list[list[Tensor]]:
    """Returns the replicated state of each rank at evaluations and at the end; no epoch's length is an interval."""
    parallel, optimizer = made(runtime, "data_parallel", ADAM)
    seen: list[list[Tensor]] = []

    def look() -> dict[str, Any]:
        seen.append(whole(parallel, optimizer))
        return {}

    config = TrainConfig(epochs=3, eval_every=2)
    train(
        parallel,
        optimizer,
        Batches(runtime, 7),
        runtime,
        config,
        evaluate=look,
        sync=SyncConfig(mode="local_sgd", every=4, outer_momentum=0.9),
    )
    return [*seen, whole(parallel, optimizer)]


def test_evaluations_and_the_caller_find_equal_ranks(two_ranks: list[Any]) -> None:
    first, second = (rank["evaluated"] for rank in two_ranks)
    assert len(first) == 3
    assert all(
        torch.equal(*pair)
        for tensors in zip(first, second, strict=True)
        for pair in zip(*tensors, strict=True)
    )


def uneven(runtime: Runtime) -> dict[str, str]:
    """Rank 1's loader has one batch more."""
    told = {}
    for mode in ("every_step", "local_sgd"):
        parallel, optimizer = made(runtime, "row_wise")
        with pytest.raises(UnevenStepsError) as error:
            train(
                parallel,
                optimizer,
                Batches(runtime, 3 + runtime.rank),
                runtime,
                sync=SyncConfig(mode=mode),
            )  # type: ignore[arg-type]
        told[mode] = str(error.value)
    return told


def test_loaders_of_unequal_length_are_told_on_every_rank_before_the_first_step(
    two_ranks: list[Any],
) -> None:
    first, second = (rank["uneven"] for rank in two_ranks)
    assert first == second
    for told in first.values():
        assert told.startswith(
            "loader: ranks have unequal numbers of batches in an epoch, rank 0: 3, rank 1: 4; pad"
        )


class Promised:
    """A loader of ``given`` batches whose length says ``promised``."""

    def __init__(self, promised: int, given: int) -> None:
        self._promised, self._given = promised, given

    def __len__(self) -> int:
        return self._promised

    def __iter__(self) -> Iterator[TowerBatch]:
        return iter([None] * self._given)  # type: ignore[list-item]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "told"), [(2, "only 2 batches"), (4, "more batches")]
)
def test_a_loader_that_breaks_its_word_ends_its_rank(given: int, told: str) -> None:
    assert len(list(exactly(Promised(3, 3)))) == 3
    with pytest.raises(
        UnevenStepsError,
        match=rf"^loader: len\(loader\) is 3, but it gave {told}: other ranks count",
    ):
        list(exactly(Promised(3, given)))
