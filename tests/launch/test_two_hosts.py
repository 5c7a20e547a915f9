"""Faults of a job on two hosts, started by the component: killed ranks, a replaced host, a cut cable."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import SETTINGS, gone
from tests.launch.two_hosts import Cluster, Network, missing

pytestmark = [pytest.mark.launch, pytest.mark.slow]
HANG_S = 10


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network(3) as built:
        yield built


@pytest.fixture(scope="module")
def whole(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A run on two hosts that nothing disturbed."""
    with Cluster(network, tmp_path_factory.mktemp("whole") / "run").start(0, 1) as job:
        assert job.end() == {0: 0, 1: 0}, job.output
    return job


def ended_alike(job: Cluster, whole: Cluster) -> bool:
    return job.records() == whole.records() and job.figures() == whole.figures()


def test_ranks_killed_on_either_host_end_as_if_they_never_were(
    network: Network, whole: Cluster, tmp_path: Path
) -> None:
    draw = random.Random(0)
    with Cluster(network, tmp_path / "run", max_retries=9).start(0, 1) as job:
        for host in (1, 0, 1):
            seen = max(job.steps(), default=0)
            job.until(lambda seen=seen: max(job.steps(), default=0) > seen)
            time.sleep(draw.random() * 0.5)
            os.kill(job.nodes[host].ranks()[0], signal.SIGKILL)
        assert job.end() == {0: 0, 1: 0}, job.output
        assert job.output.count("resuming from") == 3, job.output
        assert ended_alike(job, whole)


def test_another_host_takes_the_place_of_a_lost_one(network: Network, whole: Cluster, tmp_path: Path) -> None:
    with Cluster(network, tmp_path / "run", max_retries=3).start(0, 1) as job:
        job.until(lambda: len(job.steps()) > 1)
        job.kill(1)
        before, start = max(job.steps()), time.monotonic()
        job.start(2)
        job.until(lambda: max(job.steps()) > before)
        print(f"a checkpoint by the host that took its place after {time.monotonic() - start:.1f} s")
        codes = job.end()
        assert codes == {0: 0, 1: -signal.SIGKILL, 2: 0}, job.output
        assert job.output.count("resuming from") == 1, job.output
        assert ended_alike(job, whole)


def test_two_jobs_that_share_their_first_host_do_not_meet(network: Network, whole: Cluster, tmp_path: Path) -> None:
    for job in ("41", "42"):
        (tmp_path / job).mkdir()
    with Cluster(network, tmp_path / "41/run").start(0, 1) as first, Cluster(network, tmp_path / "42/run") as second:
        first.until(first.steps)
        second.start(0)
        time.sleep(10)  # by when its agent waits for the other node: once at the store of the first job
        for host in (0, 1):
            first.kill(host)
        second.start(1)
        assert second.end() == {0: 0, 1: 0}, second.output
        assert ended_alike(second, whole)


@pytest.mark.parametrize("max_retries", [0, 3])
def test_a_cut_cable_leaves_no_process_and_the_job_goes_on_when_it_is_mended(
    network: Network, whole: Cluster, tmp_path: Path, max_retries: int
) -> None:
    hangs = (*SETTINGS, f"train.hang_s={HANG_S}")
    # The first node waits this long for others, which a slow scheduler may start later.
    waits = {"PET_RDZV_CONF": "join_timeout=15"}
    with Cluster(network, tmp_path / "run", settings=hangs, max_retries=max_retries, environment=waits).start(
        0, 1
    ) as job:
        job.until(lambda: len(job.steps()) > 1)
        left, start = job.processes(0, 1), time.monotonic()
        network.cut(1)
        try:
            assert gone(left, HANG_S + 30), job.output
            print(f"all processes of both hosts gone after {time.monotonic() - start:.1f} s with train.hang_s={HANG_S}")
        finally:
            network.mend(1)
        assert job.processes(0, 1) == []
        assert "cannot reach host0:2" in job.nodes[1].output
        last = max(job.steps())
    with Cluster(network, tmp_path / "run").start(0, 1) as job:  # of the same id, as a scheduler starts it again
        assert job.end() == {0: 0, 1: 0}, job.output
        assert f"resuming from {job.run_dir}/checkpoints/step-{last:010d}" in job.output
        assert ended_alike(job, whole)
