"""Runtime: the device of each process, also of a job that has some of a host's GPUs; the threads of gloo."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.contracts import leave_group, run_ranks
from tests.examples import META, table
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import on_own_device
from torchrec_ext.distributed.runtime import (
    Runtime,
    _describe,
    available_memory,
)
from torchrec_ext.distributed.sharders import BagSharder
from torchrec_ext.models import two_tower
from torchrec_ext.schema import Jagged


@pytest.fixture
def two_ranks_and_one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the first of two ranks on a host with one GPU."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return monkeypatch


@pytest.mark.unit
def test_more_ranks_than_gpus_run_on_the_cpu_and_say_so(
    two_ranks_and_one_gpu: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match="and 1 GPU.*on the CPU; launch -j 1x1"):
        runtime = _describe(None, None)
    assert (runtime.device.type, runtime.backend) == ("cpu", "gloo")


@pytest.mark.unit
def test_a_gpu_that_was_asked_for_or_that_other_hosts_may_have_is_not_replaced(
    two_ranks_and_one_gpu: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="torch sees 1 GPU"):
        _describe("cuda", None)
    two_ranks_and_one_gpu.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="torch sees 1 GPU"):
        _describe(None, None)


@pytest.mark.unit
def test_a_plan_has_the_shards_of_a_rank_on_its_device() -> None:
    collection = EmbeddingBagCollection(
        tables=[table("one", 10), table("other", 20)], device=META
    )
    plan = construct_module_sharding_plan(
        collection,
        per_param_sharding={"one": row_wise(), "other": table_wise(rank=1)},
        sharder=BagSharder(),
        local_size=2,
        world_size=2,
        device_type="cuda",
    )
    runtime = Runtime(
        rank=1,
        world_size=2,
        local_world_size=2,
        device=torch.device("cuda", 3),
        backend="nccl",
    )
    moved = on_own_device(ShardingPlan({"": plan}), runtime).plan[""]
    assert isinstance(moved, EmbeddingModuleShardingPlan)
    shards = {
        name: [str(shard.placement) for shard in sharding.sharding_spec.shards]
        for name, sharding in moved.items()
    }  # type: ignore[union-attr]
    assert shards == {
        "one": ["rank:0/cuda:0", "rank:1/cuda:3"],
        "other": ["rank:1/cuda:3"],
    }


def trained_twice(runtime: Runtime) -> list[float]:
    """The losses of two runs in one process, whose tables are sharded within a host and over hosts."""
    losses = []
    filters = list(warnings.filters)
    for port in leave_group(runtime, groups=2):
        os.environ["MASTER_PORT"] = str(port)
        with Runtime.start("cpu") as group:
            torch.manual_seed(0)
            model = two_tower(
                [table("user_id", 20)],
                [table("item_id", 30)],
                tower_widths=[4],
                device=META,
            )
            parallel, _ = hybrid_parallel(
                model, group, plan=PlanConfig(sharding="table_row_wise"), seed=0
            )
            ids = {
                "user_id": Jagged(torch.tensor([1, 2])),
                "item_id": Jagged(torch.tensor([3, 4])),
            }
            batch = model.schema().assemble(ids, {}, labels=torch.tensor([0.0, 1.0]))
            with warnings.catch_warnings(record=True) as caught:
                loss, _ = parallel(batch)
                loss.backward()
                # What TorchRec calls is nobody's to change; what users call is theirs.
                assert not caught
                warnings.warn(
                    "`torch.distributed.reduce_scatter_tensor` is deprecated",
                    FutureWarning,
                    stacklevel=1,
                )
                assert len(caught) == 1
            losses.append(float(loss.detach()))
    assert warnings.filters[: len(filters)] == filters, (
        "a filter of the user's own comes first"
    )
    return losses


def test_a_process_may_train_again_when_its_first_group_has_ended() -> None:
    for first, again in run_ranks(trained_twice, 2):
        assert first == again


@pytest.mark.unit
@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("0::/\n", {}, 8_000_000),
        (
            # A container, whose own group is the topmost that it sees.
            "0::/\n",
            {"": {"memory.max": "5000", "memory.current": "3000"}},
            2000,
        ),
        (
            # A scope of systemd within a slice with a limit of its own.
            "0::/user.slice/run.scope\n",
            {
                "user.slice": {"memory.max": "9000", "memory.current": "8500"},
                "user.slice/run.scope": {"memory.max": "max", "memory.current": "8"},
            },
            500,
        ),
        (
            # A job of Slurm under version 1, with pages that the kernel gives back.
            "9:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n0::/\n",
            {
                "memory": {"memory.limit_in_bytes": str(2**63 - 4096)},
                "memory/slurm/job_7": {
                    "memory.limit_in_bytes": "7000",
                    "memory.usage_in_bytes": "6500",
                    "memory.stat": "total_inactive_file 300\n",
                },
            },
            800,
        ),
    ],
)
def test_memory_is_limited_by_every_control_group_above_the_process(
    groups: str, files: dict[str, dict[str, str]], available: int, tmp_path: Path
) -> None:
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    (proc.parent / "meminfo").write_text("MemAvailable:    7812 kB\n")
    for folder, contents in files.items():
        made = tmp_path / "sys/fs/cgroup" / folder
        made.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (made / name).write_text(content)
    assert available_memory(tmp_path) == min(available, 7812 * 1024)


@pytest.mark.unit
def test_threads_that_a_script_has_chosen_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert _describe(None, None).threads == 1
    finally:
        torch.set_num_threads(before)
