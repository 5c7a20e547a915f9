"""What a plan says of a rank's memory, against the model that it holds.

torch's fake process group runs one rank of any number, on a fake CUDA device, whose tensors take no memory.
"""

import math
import os
import types
import unittest.mock
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import comm
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

from tests.distributed.plan.topologies import GB, drafted, topology
from tests.examples import META
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.optim.sharded import kernels_of
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.storage import state_storage
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections

ROWS = 512  # of a rank and step, so that each of 512 ranks gets an id of every batch
HOST = 8
K, M = 1_000, 1_000_000
Tables = dict[str, tuple[int, int]]  # rows and columns by name


def tables_model(sizes: Tables, data_type: DataType = DataType.FP32) -> torch.nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=dim,
            data_type=data_type,
        )
        for name, (rows, dim) in sizes.items()
    ]
    return torch.nn.ModuleDict(
        {"tables": EmbeddingBagCollection(tables=configs, device=META)}
    )


@contextmanager
def simulated(rank: int, world_size: int) -> Iterator[Runtime]:
    """One rank of a job on hosts of 8 GPUs, whose other ranks do not exist."""
    # TorchRec keeps the groups of a host and across hosts in globals.
    groups = unittest.mock.patch.multiple(comm, _INTRA_PG=None, _CROSS_PG=None)
    # Rank 0, which does not exist, says in it that TorchRec does not check its
    # collectives.
    said = unittest.mock.patch("torch.distributed.broadcast_object_list")
    with unittest.mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(HOST)), groups, said:
        dist.init_process_group(
            "fake", rank=rank, world_size=world_size, store=FakeStore()
        )
        try:
            yield Runtime(
                rank=rank,
                local_rank=rank % HOST,
                world_size=world_size,
                local_world_size=HOST,
                device=torch.device("cuda", rank % HOST),
            )
        finally:
            dist.destroy_process_group()


class Memory(NamedTuple):
    """Bytes that the kernels of a rank have allocated."""

    gpu: int
    host: int
    weights: int
    state: int
    cache: int


class NoDevice(TorchFunctionMode):
    """Has fake CUDA tensors do without a build of torch for CUDA, which some methods ask for even of fake tensors."""

    def __torch_function__(
        self,
        func: Any,
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            start, stop, _ = args[1].indices(len(args[0]))
            return args[0].narrow(0, start, stop - start)
        if func is torch.Tensor.uniform_:
            return args[0]
        return func(*args, **(kwargs or {}))


WEIGHTS = ("weights_dev", "weights_uvm", "weights_host")
STATE = tuple(
    f"momentum{number}_{place}" for number in (1, 2) for place in ("dev", "uvm", "host")
)
CACHE = ("lxu_cache_weights", "lxu_cache_state", "lxu_state", "cache_index_table_map")


def allocated(
    model: torch.nn.Module,
    optimizer: OptimizerConfig,
    plan: Any,
    rank: int,
    world_size: int,
) -> Memory:
    """What the kernels of a rank allocate, on a GPU that does not exist."""
    sizes: dict[str, int] = {}
    with simulated(rank, world_size) as runtime:
        # Its mesh of ranks has numbers to read, which fake tensors have not.
        env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
        here = "torchrec_ext.distributed.parallel"
        gpu = types.SimpleNamespace(total_memory=80 * GB)
        with ExitStack() as stack:
            for what, told in (
                # The first values of a table take many operations, and no memory.
                (f"{here}.initialise_tables", {}),
                # Other ranks are not there to be asked; this one speaks for all.
                (f"{here}.gather_objects", {"side_effect": lambda own, n: [own] * n}),
                # FBGEMM asks how much memory is left for a cache.
                ("torch.cuda.get_device_properties", {"return_value": gpu}),
                ("torch.cuda.memory_reserved", {"return_value": 0}),
            ):
                stack.enter_context(unittest.mock.patch(what, **told))
            stack.enter_context(
                unittest.mock.patch.object(
                    ShardingEnv, "from_process_group", return_value=env
                )
            )
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(NoDevice())
            sharded, _ = hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer)
        for _, collection in collections(sharded):
            for module in kernels_of(collection):
                for name in (*WEIGHTS, *STATE, *CACHE):
                    tensor = getattr(module.emb_module, name, None)
                    # Without a cache FBGEMM keeps tensors of one number in its place.
                    if tensor is not None and tensor.numel() > 1:
                        sizes[name] = (
                            sizes.get(name, 0) + tensor.numel() * tensor.element_size()
                        )
    host = sum(size for name, size in sizes.items() if name.endswith(("_uvm", "_host")))
    parts = [
        sum(sizes.get(name, 0) for name in names) for names in (WEIGHTS, STATE, CACHE)
    ]
    return Memory(sum(sizes.values()) - host, host, *parts)


CACHED = {
    "sharding": "row_wise",
    "kernel": "fused_uvm_caching",
    "cache_load_factor": 0.1,
}
PLANS: dict[str, tuple[Tables, dict[str, Any]]] = {
    "table_wise": (
        {"ad": (20 * M, 64), "item": (12 * M, 64), "place": (90 * K, 32)},
        {"sharding": "table_wise"},
    ),
    "row_wise": (
        {"ad": (300 * M, 64), "item": (12 * M, 64), "place": (90 * K, 32)},
        {"sharding": "row_wise"},
    ),
    "grid": (
        {"ad": (30 * M, 64), "item": (12 * M, 128)},
        {"sharding": "grid_shard", "kernel": "fused"},
    ),
    "a cache on the GPU": ({"ad": (300 * M, 64)}, CACHED),
    "300 M x 64": ({"ad": (300 * M, 64)}, {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_of_512_allocates_what_the_plan_says(name: str) -> None:
    check_memory(*PLANS[name], "row_wise_adagrad", 512)


def test_a_cache_has_rows_as_wide_as_its_widest_table() -> None:
    tables = {"narrow": (300 * M, 8), "wide": (M, 128)}
    check_memory(tables, CACHED, "row_wise_adagrad", 512)
    small, sgd = topology(8, 8, hbm_gb=1), OptimizerConfig(tables="sgd")
    with pytest.raises(
        PlanError, match=r"no sharding plan fits 8 rank\(s\) of 870\.40 MiB"
    ):
        drafted(tables_model(tables), small, PlanConfig(**CACHED), sgd, ROWS)


def check_memory(
    tables: Tables,
    config: Mapping[str, Any],
    kind: str,
    world_size: int,
    data_type: DataType = DataType.FP32,
) -> None:
    """Compares the first, the fullest and the last rank of a plan with what their kernels allocate."""
    model = tables_model(tables, data_type)
    optimizer = OptimizerConfig(tables=kind)  # type: ignore[arg-type]
    devices = topology(world_size, HOST)
    draft = drafted(model, devices, PlanConfig(**config), optimizer, ROWS)
    choices = optimizer.for_tables(model)
    number = 4 if data_type == DataType.FP32 else 2
    # By rank: bytes of GPU, host, weights, state, and of ids and embeddings on their way.
    planned: dict[int, list[int]] = {}
    for option in draft.options:
        for shard in option.shards:
            kernel = option.compute_kernel
            state = state_storage(choices[option.name], shard.size, kernel, "cuda")
            sums = planned.setdefault(shard.rank, [0] * 5)
            for at, size in enumerate(
                (
                    shard.storage.hbm,
                    shard.storage.ddr,
                    math.prod(shard.size) * number,
                    state.hbm + state.ddr,
                    passing_bytes(
                        option.sharding_type, shard.size[1], world_size, number
                    ),
                )
            ):
                sums[at] += size
    fullest = max(planned, key=lambda rank: sum(planned[rank][:2]))
    for rank in {min(planned), fullest, max(planned)}:
        gpu, host, weights, state_bytes, passing = planned[rank]
        memory = allocated(
            tables_model(tables, data_type), optimizer, draft.plan, rank, world_size
        )
        assert (memory.weights, memory.state) == (weights, state_bytes)
        assert memory.host == host
        # Buffers are ids and embeddings on their way, and what is cached. A cache has
        # sets of 32 rows.
        buffers = gpu + host - weights - state_bytes
        row_bytes = 4 * max(dim for _, dim in tables.values()) + 16
        assert abs(memory.cache - (buffers - passing)) <= 32 * row_bytes
        assert memory.gpu - memory.cache == gpu - buffers


def passing_bytes(sharding: str, columns: int, world_size: int, number: int) -> int:
    """Bytes of ids and embeddings of a step, with one id of each row."""
    hosts = {"row_wise": world_size, "grid_shard": HOST, "table_row_wise": HOST}
    ids = ROWS * world_size * 8 // hosts.get(sharding, 1)
    return ids + ROWS * world_size * columns * number


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "lazy_adam"])
def test_state_lies_where_the_plan_says(kind: str, kernel: str) -> None:
    config = {"sharding": "column_wise", "kernel": kernel}
    check_memory({"a": (M, 64)}, config, kind, 16)


def test_the_state_of_tables_in_16_bits_has_32() -> None:
    config = {"sharding": "row_wise", "kernel": "fused"}
    for kind in ("row_wise_adagrad", "adagrad"):
        check_memory({"a": (M, 64)}, config, kind, 16, DataType.FP16)
