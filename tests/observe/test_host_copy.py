"""A tensor's values on the host, read later: those of the time of the copy, which waits for nothing."""

import pytest
import torch

from torchrec_ext.observe.host_copy import HostCopy


@pytest.mark.unit
def test_a_tensor_on_the_cpu_is_read_as_it_is() -> None:
    values = torch.tensor([1.0, 2.0])
    assert HostCopy(values).read() is values


@pytest.mark.gpu
def test_a_copy_has_the_values_of_its_time_in_page_locked_memory() -> None:
    values = torch.zeros(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = HostCopy(values)
        values.fill_(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copy.read().tolist() == [0.0, 0.0]
    assert copy.read().is_pinned()
