"""Two real ranks that call why_slow: which of them the others wait for, and that their training goes on as it was."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.contracts import run_ranks
from torchrec_ext.diagnose import why_slow
from torchrec_ext.distributed.runtime import Runtime

pytestmark = pytest.mark.launch


class Slow:
    """Batches of which rank 1 waits 30 ms for each."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(8):
            if dist.get_rank() == 1:
                time.sleep(0.03)
            yield torch.ones(16, 8), torch.zeros(16, 1)


def _diagnosed(runtime: Runtime) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    before = [each.detach().clone() for each in model.parameters()]

    def loss(x: Tensor, y: Tensor) -> Any:
        return (model(x) - y).square().mean()

    diagnosis = why_slow(model, optimizer, loss, Slow())
    assert diagnosis.verdict == "ranks"
    title = "the other ranks wait for rank 1: its batches take longer"
    assert diagnosis.findings[0].title == title
    assert (title in str(diagnosis)) == (runtime.rank == 0)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert parameter.equal(kept)
    with pytest.raises(ValueError, match="capture=True on 2 ranks"):
        why_slow(model, optimizer, loss, Slow(), capture=True)
    with pytest.raises(ValueError, match="holds no program"):
        diagnosis.realised(print)


def test_the_rank_whose_batches_are_late_is_named_and_nothing_stays() -> None:
    run_ranks(_diagnosed, 2)
