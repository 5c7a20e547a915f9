"""trained(): what a loss does not reach; all else that it does is compared with torch's own loops by its callers."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext.capture.memory import Clock
from torchrec_ext.capture.step import StepPart, trained
from torchrec_ext.distributed.optim.config import Choice

pytestmark = pytest.mark.unit


# Of TorchRec's sharded tables none counts for the limit, and a model may have nothing else.
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_a_part_that_the_loss_does_not_reach_is_not_moved(clip_norm: float) -> None:
    reached, spare = (torch.ones(2, requires_grad=True) for _ in range(2))
    count = torch.zeros(())
    sgd = Choice(kind="sgd", lr=0.1, eps=0.0, betas=(0.0, 0.0), weight_decay=0.5)
    clock = Clock(count, torch.tensor(0.1))
    parts = [
        StepPart(each, [], sgd, clock, is_limited=False) for each in (reached, spare)
    ]
    loss, _ = trained(
        lambda tables: (reached.sum(), None), (), parts, count, clip_norm=clip_norm
    )
    assert (float(loss), float(count)) == (2.0, 1.0)
    assert spare.tolist() == [1.0, 1.0]
    assert reached.tolist() == pytest.approx([0.85, 0.85])
