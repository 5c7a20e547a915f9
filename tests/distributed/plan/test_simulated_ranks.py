"""What a plan says of a rank's memory, against the model that it holds.

torch's fake process group runs one rank of any number, on a fake CUDA device, whose tensors take no memory.
"""

import math
import os
import types
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
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
from torchrec_ext.distributed.plan.draft import Draft, PlanError
from torchrec_ext.distributed.plan.explain import bytes_per_weight
from torchrec_ext.distributed.plan.storage import state_storage
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, tables_of

ROWS = 512  # of a rank and step, so that each of 512 ranks gets an id of every batch
HOST = 8


class TableSize(NamedTuple):
    """A table: its name, ``rows`` and ``dim`` columns, and the mean number of ``ids`` of a row of the data."""

    name: str
    rows: int
    dim: int
    ids: float


def parse_tables(text: str) -> list[TableSize]:
    """Parses a text such as ``ad=300Mx64,history=12Kx64x20``."""
    units = {"K": "000", "M": "000000"}
    sizes = []
    for item in text.split(","):
        name, _, size = item.partition("=")
        rows, dim, ids = [*size.split("x"), "1"][:3]
        number = int(rows[:-1] + units.get(rows[-1], rows[-1]))
        sizes.append(TableSize(name, number, int(dim), float(ids)))
    return sizes


def tables_model(
    sizes: Sequence[TableSize], data_type: DataType = DataType.FP32
) -> torch.nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=size.name,
            feature_names=[size.name],
            num_embeddings=size.rows,
            embedding_dim=size.dim,
            data_type=data_type,
        )
        for size in sizes
    ]
    return torch.nn.ModuleDict(
        {"tables": EmbeddingBagCollection(tables=configs, device=META)}
    )


@contextmanager
def simulated(rank: int, world_size: int, device: str) -> Iterator[Runtime]:
    """One rank of a job on hosts of 8, whose other ranks do not exist."""
    local_rank = rank % HOST
    where = (
        torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    )
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
                local_rank=local_rank,
                world_size=world_size,
                local_world_size=HOST,
                device=where,
            )
        finally:
            dist.destroy_process_group()


class Planned(NamedTuple):
    """Bytes of a rank by a plan: of its GPU and its host, and of these weights, optimizer state and buffers."""

    rank: int
    device: int
    host: int
    weights: int
    state: int

    @property
    def buffers(self) -> int:
        """What passes through the rank in a step, and what is cached from its host."""
        return self.device + self.host - self.weights - self.state


def planned(
    draft: Draft, model: torch.nn.Module, optimizer: OptimizerConfig, world_size: int
) -> list[Planned]:
    """The first, the fullest and the last rank."""
    ranks = [Planned(rank, 0, 0, 0, 0) for rank in range(world_size)]
    tables = {table.name: table for table in tables_of(model)}
    choices = optimizer.for_tables(model)
    for option in draft.options:
        table, choice = tables[option.name], choices[option.name]
        for shard in option.shards:
            state = state_storage(choice, shard.size, option.compute_kernel, "cuda")
            before = ranks[shard.rank]
            ranks[shard.rank] = Planned(
                shard.rank,
                before.device + shard.storage.hbm,
                before.host + shard.storage.ddr,
                before.weights + math.prod(shard.size) * bytes_per_weight(table),
                before.state + state.hbm + state.ddr,
            )
    fullest = max(ranks, key=lambda rank: rank.device + rank.host)
    return [ranks[number] for number in sorted({0, fullest.rank, world_size - 1})]


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
    with simulated(rank, world_size, "cuda") as runtime:
        # Its mesh of ranks has numbers to read, which fake tensors have not.
        env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
        with ExitStack() as stack:
            stack.enter_context(
                unittest.mock.patch.object(
                    ShardingEnv, "from_process_group", return_value=env
                )
            )
            # The first values of a table take many operations, and no memory.
            stack.enter_context(
                unittest.mock.patch(
                    "torchrec_ext.distributed.parallel.initialise_tables"
                )
            )
            # Other ranks are not there to be asked; this one speaks for all.
            stack.enter_context(
                unittest.mock.patch(
                    "torchrec_ext.distributed.parallel.gather_objects",
                    side_effect=lambda value, ranks: [value] * ranks,
                )
            )
            # FBGEMM asks how much memory is left for a cache.
            gpu = types.SimpleNamespace(total_memory=80 * GB)
            stack.enter_context(
                unittest.mock.patch(
                    "torch.cuda.get_device_properties", return_value=gpu
                )
            )
            stack.enter_context(
                unittest.mock.patch("torch.cuda.memory_reserved", return_value=0)
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


PLANS = {
    "table_wise": ("ad=20Mx64,item=12Mx64,place=90Kx32", {"sharding": "table_wise"}),
    "row_wise": ("ad=300Mx64,item=12Mx64,place=90Kx32", {"sharding": "row_wise"}),
    "grid": ("ad=30Mx64,item=12Mx128", {"sharding": "grid_shard", "kernel": "fused"}),
    "a cache on the GPU": (
        "ad=300Mx64",
        {
            "sharding": "row_wise",
            "kernel": "fused_uvm_caching",
            "cache_load_factor": 0.1,
        },
    ),
    "300 M x 64": ("ad=300Mx64", {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_of_512_allocates_what_the_plan_says(name: str) -> None:
    tables, config = PLANS[name]
    check_memory(tables, config, "row_wise_adagrad", 512)


def test_a_cache_has_rows_as_wide_as_its_widest_table() -> None:
    cached = {
        "sharding": "row_wise",
        "kernel": "fused_uvm_caching",
        "cache_load_factor": 0.1,
    }
    check_memory("narrow=300Mx8,wide=1Mx128", cached, "row_wise_adagrad", 512)
    model = tables_model(parse_tables("narrow=300Mx8,wide=1Mx128"))
    small = topology(8, 8, hbm_gb=1)
    with pytest.raises(
        PlanError,
        match=r"no sharding plan fits 8 rank\(s\) of 870\.40 MiB",
    ):
        drafted(model, small, PlanConfig(**cached), OptimizerConfig(tables="sgd"), ROWS)


def check_memory(
    tables: str,
    config: Mapping[str, Any],
    kind: str,
    world_size: int,
    data_type: DataType = DataType.FP32,
) -> None:
    sizes = parse_tables(tables)
    model = tables_model(sizes, data_type)
    optimizer = OptimizerConfig(tables=kind)  # type: ignore[arg-type]
    draft = drafted(
        model, topology(world_size, HOST), PlanConfig(**config), optimizer, ROWS
    )
    for rank in planned(draft, model, optimizer, world_size):
        memory = allocated(
            tables_model(sizes, data_type),
            optimizer,
            draft.plan,
            rank.rank,
            world_size,
        )
        assert (memory.weights, memory.state) == (rank.weights, rank.state)
        assert memory.host == rank.host
        # Buffers are ids and embeddings on their way, and what is cached. A cache has
        # sets of 32 rows.
        passing = 0
        for option in draft.options:
            for shard in option.shards:
                if shard.rank == rank.rank:
                    passing += passing_bytes(
                        option.sharding_type, shard.size[1], world_size, data_type
                    )
        cached = rank.buffers - passing
        row_bytes = 4 * max(size.dim for size in sizes) + 16
        assert abs(memory.cache - cached) <= 32 * row_bytes
        assert memory.gpu - memory.cache == rank.device - rank.buffers


def passing_bytes(
    sharding: str, columns: int, world_size: int, data_type: DataType = DataType.FP32
) -> int:
    """Bytes of ids and embeddings of a step, with one id of each row."""
    spread = {"row_wise": world_size, "grid_shard": HOST, "table_row_wise": HOST}.get(
        sharding, 1
    )
    width = 4 if data_type == DataType.FP32 else 2
    return ROWS * world_size * 8 // spread + ROWS * world_size * columns * width


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "lazy_adam"])
def test_state_lies_where_the_plan_says(kind: str, kernel: str) -> None:
    check_memory("a=1Mx64", {"sharding": "column_wise", "kernel": kernel}, kind, 16)


def test_the_state_of_tables_in_16_bits_has_32() -> None:
    for kind in ("row_wise_adagrad", "adagrad"):
        check_memory(
            "a=1Mx64",
            {"sharding": "row_wise", "kernel": "fused"},
            kind,
            16,
            DataType.FP16,
        )
