"""Which ops wait for a GPU, asked of fake tensors on one."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_ext.observe.ops import waits_for_device


class _Asked(TorchDispatchMode):
    """Asks it of each op, and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.waits |= waits_for_device(func, args, kwargs)
        return func(*args, **(kwargs or {}))


# Tensor's own methods ask for a device that a CPU build of torch does not have.
index, nonzero = torch.ops.aten.index.Tensor, torch.ops.aten.nonzero.default
STEPS: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "item": (lambda x, host: x.sum().item(), True),
    "if": (lambda x, host: bool(x.sum() > 1), True),
    "nonzero": (lambda x, host: nonzero(x), True),
    "mask": (lambda x, host: index(x, [x > 0]), True),
    "cpu": (lambda x, host: x.cpu(), True),
    "to the host": (lambda x, host: x.to("cpu"), True),
    "into a tensor of the host": (lambda x, host: host.copy_(x), True),
    "repeat_interleave": (lambda x, host: torch.repeat_interleave(x.long()), True),
    "to the host, ahead": (lambda x, host: x.to("cpu", non_blocking=True), False),
    "into a tensor of the host, ahead": (
        lambda x, host: host.copy_(x, non_blocking=True),
        False,
    ),
    "repeat_interleave of known size": (
        lambda x, host: torch.repeat_interleave(x.long(), output_size=8),
        False,
    ),
    "where": (lambda x, host: torch.where(x > 0, x, 0.0), False),
    "rows": (lambda x, host: index(x, [x.long()]), False),
    "dtype": (lambda x, host: x.half() + x, False),
    "to the device": (lambda x, host: x.copy_(host), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_ops_that_wait_for_a_gpu(name: str) -> None:
    step, waits = STEPS[name]
    with FakeTensorMode():
        x, host = torch.ones(4, device="cuda"), torch.ones(4)
        with (
            _Asked() as asked,
            suppress(UnsupportedFakeTensorException, RuntimeError),
        ):
            # a fake one has no values
            step(x, host)
    assert asked.waits == waits
