"""HostCopy: a tensor's values on the host, read a step later, so that nobody waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies a tensor to the host without a wait; :meth:`read` waits for what the device had begun before the copy.

    Args:
        values: tensor to copy. One on the CPU is kept as it is, so it must not change until it is read.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            # The copy goes into page-locked memory, so that the host need not wait for
            # it.
            self._values = values.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # Not of the current device, which may be another one.
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> Tensor:
        """Returns the values on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
