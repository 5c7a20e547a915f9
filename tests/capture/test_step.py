"""trained(): what a loss does not reach; all else that it does is compared with torch's own loops by its callers."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext.capture.memory import Clock
from torchrec_ext.capture.step import StepPart, trained
from torchrec_ext.distributed.optim.config import Choice

pytestmark = pytest.mark.unit


def test_a_part_that_the_loss_does_not_reach_is_not_moved() -> None:
    reached, spare = (torch.ones(2, requires_grad=True) for _ in range(2))
    count = torch.zeros(())
    sgd = Choice(kind="sgd", lr=0.1, eps=0.0, betas=(0.0, 0.0), weight_decay=0.5)
    clock = Clock(count, torch.tensor(0.1))
    parts = [StepPart(each, [], sgd, clock) for each in (reached, spare)]
    loss, _ = trained(lambda tables: (reached.sum(), None), (), parts, count)
    assert (float(loss), float(count)) == (2.0, 1.0)
    assert spare.tolist() == [1.0, 1.0]
    assert reached.tolist() == pytest.approx([0.85, 0.85])
