"""Faults of a job on two hosts, started by the component: killed ranks, a replaced host, a cut cable."""

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import SETTINGS, gone
from tests.launch.two_hosts import Cluster, Network, missing

pytestmark = [pytest.mark.launch, pytest.mark.slow(minutes=0.5)]
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


def test_another_host_takes_the_place_of_a_lost_one(
    network: Network, whole: Cluster, tmp_path: Path
) -> None:
    with Cluster(network, tmp_path / "run", max_retries=3).start(0, 1) as job:
        job.until(lambda: len(job.steps()) > 1)
        job.kill(1)
        before, start = max(job.steps()), time.monotonic()
        job.start(2)
        job.until(lambda: max(job.steps()) > before)
        print(
            f"a checkpoint by the host that took its place after {time.monotonic() - start:.1f} s"
        )
        codes = job.end()
        assert codes == {0: 0, 1: -signal.SIGKILL, 2: 0}, job.output
        assert job.output.count("resuming from") == 1, job.output
        assert ended_alike(job, whole)


def alike(job: Cluster, whole: Cluster) -> None:
    """Checks that a run took as many rows in each step as another, and learned from them the same to rounding."""
    exact = ("kind", "epoch", "step", "rows")
    for record, other in zip(job.records(), whole.records(), strict=True):
        assert [record.get(key) for key in exact] == [other.get(key) for key in exact]
        if record["kind"] == "train":
            assert record["loss"] == pytest.approx(other["loss"], rel=1e-4), record
    assert job.figures()["auc"] == pytest.approx(whole.figures()["auc"], abs=5e-3)


# Without dropout, whose draws depend on the number of ranks; as many rows on each rank,
# whose means count alike; and plain SGD, under which rounding does not grow as under
# Adagrad and Adam, which divide by small numbers.
ELASTIC = (
    *(
        *SETTINGS,
        "model.dropout=0",
        "train.epochs=30",
        "loader.batch_size=362",
        "plan.sharding=row_wise",
    ),
    *(
        "optimizer.tables=sgd",
        "optimizer.dense=sgd",
        "optimizer.tables_lr=0.02",
        "optimizer.dense_lr=0.02",
    ),
)
# Seconds for which the hosts that are up wait for more of them.
SHORT = {"PET_RDZV_CONF": "last_call_timeout=5"}


@pytest.fixture(scope="module")
def steady(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A run on two hosts without dropout that nothing disturbed."""
    run = tmp_path_factory.mktemp("steady") / "run"
    with Cluster(network, run, settings=ELASTIC).start(0, 1) as job:
        assert job.end() == {0: 0, 1: 0}, job.output
    return job


def test_an_elastic_job_goes_on_with_one_host_and_with_two_when_the_other_is_back(
    network: Network, steady: Cluster, tmp_path: Path
) -> None:
    job = Cluster(
        network,
        tmp_path / "run",
        settings=ELASTIC,
        j="1:2x1",
        max_retries=3,
        environment=SHORT,
    )
    with job.start(0, 1):
        for _ in range(2):
            before = max(job.steps(), default=0)
            job.until(lambda before=before: max(job.steps(), default=0) > before)
            job.kill(1)
            before, start = max(job.steps()), time.monotonic()
            job.until(lambda before=before: max(job.steps()) > before)
            print(
                f"a checkpoint by one host {time.monotonic() - start:.1f} s after the other was lost"
            )
            begun, start = job.output.count("resuming from"), time.monotonic()
            job.start(1)
            job.until(lambda begun=begun: job.output.count("resuming from") > begun)
            print(
                f"resumed on two hosts {time.monotonic() - start:.1f} s after the other came back"
            )
        assert job.end() == {0: 0, 1: 0}, job.output
        ranks = re.findall(r"^ranks: (\d)", job.output, re.MULTILINE)
        assert ranks == ["2", "1", "2", "1", "2"], job.output
    alike(job, steady)


def test_twenty_kills_of_ranks_and_hosts_end_with_the_figures_of_a_run_that_nothing_disturbed(
    network: Network, steady: Cluster, tmp_path: Path
) -> None:
    draw = random.Random(0)
    job = Cluster(
        network,
        tmp_path / "run",
        settings=ELASTIC,
        j="1:2x1",
        max_retries=40,
        environment=SHORT,
    )
    with job.start(0, 1):
        for kill in range(20):
            seen = max(job.steps(), default=0)
            job.until(lambda seen=seen: max(job.steps(), default=0) > seen)
            time.sleep(draw.random() * 0.2)
            if kill % 5 == 4:
                job.kill(1)
                job.start(1)
            else:
                job.until(lambda: all(node.ranks() for node in job.nodes.values()))
                os.kill(
                    draw.choice(
                        [pid for node in job.nodes.values() for pid in node.ranks()]
                    ),
                    signal.SIGKILL,
                )
        assert job.end() == {0: 0, 1: 0}, job.output
        assert job.output.count("resuming from") >= 20
    alike(job, steady)


def test_two_jobs_that_share_their_first_host_do_not_meet(
    network: Network, whole: Cluster, tmp_path: Path
) -> None:
    for job in ("41", "42"):
        (tmp_path / job).mkdir()
    with (
        Cluster(network, tmp_path / "41/run").start(0, 1) as first,
        Cluster(network, tmp_path / "42/run") as second,
    ):
        first.until(first.steps)
        second.start(0)
        # by when its agent waits for the other node: once at the store of the first job
        time.sleep(10)
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
    with Cluster(
        network,
        tmp_path / "run",
        settings=hangs,
        max_retries=max_retries,
        environment=waits,
    ).start(0, 1) as job:
        job.until(lambda: len(job.steps()) > 1)
        left, start = job.processes(0, 1), time.monotonic()
        network.cut(1)
        try:
            assert gone(left, HANG_S + 30), job.output
            print(
                f"all processes of both hosts gone after {time.monotonic() - start:.1f} s with train.hang_s={HANG_S}"
            )
        finally:
            network.mend(1)
        assert job.processes(0, 1) == []
        assert "cannot reach host0:2" in job.nodes[1].output
        last = max(job.steps())
    with Cluster(network, tmp_path / "run").start(0, 1) as job:
        # of the same id, as a scheduler starts it again
        assert job.end() == {0: 0, 1: 0}, job.output
        assert f"resuming from {job.run_dir}/checkpoints/step-{last:010d}" in job.output
        assert ended_alike(job, whole)
