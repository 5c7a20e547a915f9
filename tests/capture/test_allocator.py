"""Memory that a step frees serves the next one."""

import platform
import resource

import pytest
import torch

from tests.contracts import run_ranks
from torchrec_ext.capture.executors import keep_freed_memory
from torchrec_ext.distributed.runtime import Runtime


def faults(_: Runtime) -> tuple[bool, int]:
    """Pages that 10 steps fault in, each with 20 matrices of 4 MB, after three others."""
    kept = keep_freed_memory()
    for step in range(13):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        matrices = [torch.ones(1 << 20) for _ in range(20)]
        del matrices
    return kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's")
def test_a_step_faults_in_no_page_of_what_the_step_before_freed() -> None:
    ((kept, count),) = run_ranks(faults, 1)
    assert kept
    # of 10 x 20,480: fewer than one matrix has; a fork copies pages that it writes to
    assert count < 1024
