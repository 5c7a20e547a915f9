"""Tables as whole matrices, however they are sharded: finds this rank's shards, and fills them by (table, rows)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)

COLLECTIONS = (
    EmbeddingBagCollection,
    EmbeddingCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
# Each block of rows draws from a generator of its own, so another number here means
# other initial tables.
_BLOCK_ROWS = 4096


class Shard(NamedTuple):
    """This rank's piece of a table, from ``row`` and ``column`` on; writing ``tensor`` writes the table."""

    fqn: str
    config: BaseEmbeddingConfig
    tensor: Tensor
    row: int
    column: int


def collections(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path in the unwrapped module, collection) for every embedding collection, sharded or not."""
    for path, child in get_unwrapped_module(module).named_modules():
        if isinstance(child, COLLECTIONS):
            yield path, child


def table_shardings(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    """Returns the sharding of each table by its name, whatever the path of its collection."""
    shardings: dict[str, ParameterSharding] = {}
    for module in plan.plan.values():
        if isinstance(module, EmbeddingModuleShardingPlan):
            shardings |= module
    return shardings


def table_configs(collection: nn.Module) -> list[BaseEmbeddingConfig]:
    """Returns the configurations of the tables of one collection, sharded or not."""
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    if isinstance(collection, EmbeddingCollection):
        return list(collection.embedding_configs())
    # The sharded classes keep the configs but have no public way to them.
    if isinstance(collection, ShardedEmbeddingBagCollection):
        return list(collection._embedding_bag_configs)
    return list(collection._embedding_configs)  # type: ignore[arg-type]


def tables_of(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Returns the configurations of all tables of a module, in the order of its collections."""
    tables: list[BaseEmbeddingConfig] = []
    for _, collection in collections(module):
        tables += table_configs(collection)
    return tables


def kernels_by_table(collection: nn.Module) -> dict[str, str]:
    """Returns TorchRec's compute kernel of each table of a sharded collection by name; nothing for an unsharded one."""
    plan = getattr(collection, "module_sharding_plan", {})
    return {name: sharding.compute_kernel for name, sharding in plan.items()}


def local_shards(module: nn.Module) -> Iterator[Shard]:
    """Yields this rank's shards; an unsharded or data-parallel table is one shard."""
    for path, collection in collections(module):
        configs = {config.name: config for config in table_configs(collection)}
        for key, value in collection.state_dict().items():
            config = configs[key.split(".")[1]]
            # A model may be a collection itself, at the empty path.
            fqn = f"{path}.{key}".lstrip(".")
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    row, column = shard.metadata.shard_offsets
                    yield Shard(fqn, config, shard.tensor, row, column)
            else:
                yield Shard(fqn, config, value, 0, 0)


@torch.no_grad()
def fill_tables(
    module: nn.Module, rows: Callable[[str, BaseEmbeddingConfig, int, int], Tensor]
) -> None:
    """Writes every table from ``rows(fqn, config, start, stop)``, a (stop - start, D) matrix, block by block.

    Each rank asks only for the rows of its own shards, and one block of them at a time is in memory.
    """
    for shard in local_shards(module):
        height, width = shard.tensor.shape
        end = shard.row + height
        columns = slice(shard.column, shard.column + width)
        for start in range(shard.row, end, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, end)
            # Whole rows are drawn, so that a split of the columns does not change the
            # draws.
            block = rows(shard.fqn, shard.config, start, stop)[:, columns]
            shard.tensor[start - shard.row : stop - shard.row].copy_(block)


# These fill each number on its own, so that a block of rows needs no other.
_NUMBER_BY_NUMBER = (
    nn.init.constant_,
    nn.init.normal_,
    nn.init.ones_,
    nn.init.trunc_normal_,
    nn.init.uniform_,
    nn.init.zeros_,
)


def rows_of_tables(module: nn.Module) -> dict[str, Tensor]:
    """Returns the rows of the tables of an unsharded module that have memory, by name; without those on meta."""
    return {
        shard.fqn: shard.tensor.detach()
        for shard in local_shards(module)
        if not shard.tensor.is_meta
    }


def _leave(weight: Tensor) -> Tensor:
    return weight


@contextmanager
def without_init_fn(module: nn.Module) -> Iterator[None]:
    """Has TorchRec leave tables as they are in the block: it calls ``init_fn`` on shards, of whatever shape."""
    configs = [(config, config.init_fn) for config in tables_of(module)]
    for config, _ in configs:
        config.init_fn = _leave
    try:
        yield
    finally:
        for config, init_fn in configs:
            config.init_fn = init_fn


def initialise_tables(
    module: nn.Module, seed: int, given: Mapping[str, Tensor] | None = None
) -> None:
    """Initialises every table from ``seed`` and the table's name alone, or with the rows that it is given.

    TorchRec initialises shard by shard, so that with one seed the tables differ by plan and number of ranks. Here an
    ``init_fn`` of ``torch.nn.init`` that fills each number on its own, TorchRec's default among them, is called on row
    blocks of fixed size, which have generators of their own. Any other one is called on the whole table, of which each
    shard takes its slice: a rank with a shard holds that one table in memory.

    Args:
        module: sharded or unsharded module.
        seed: seed of the drawn tables.
        given: (rows, D) first values by the full name of the weight, for tables that are not drawn.
    """
    given = given or {}
    whole: dict[str, Tensor] = {}

    def rows(fqn: str, config: BaseEmbeddingConfig, start: int, stop: int) -> Tensor:
        if fqn in given:
            return given[fqn][start:stop]
        if not _is_number_by_number(config.init_fn):
            if fqn not in whole:
                whole.clear()
                whole[fqn] = _drawn(config, 0, config.num_embeddings, seed)
            return whole[fqn][start:stop]
        # A shard may begin inside a block; the whole block is drawn and cut, so that
        # the shards' rows are the table's.
        first = start - start % _BLOCK_ROWS
        blocks = [
            _drawn(config, block, min(_BLOCK_ROWS, config.num_embeddings - block), seed)
            for block in range(first, stop, _BLOCK_ROWS)
        ]
        return torch.cat(blocks)[start - first : stop - first]

    fill_tables(module, rows)


def _is_number_by_number(init_fn: Any) -> bool:
    while isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    return init_fn in _NUMBER_BY_NUMBER


def _drawn(config: BaseEmbeddingConfig, start: int, count: int, seed: int) -> Tensor:
    # Python's hash() of a text differs from process to process, and ranks must draw the
    # same rows.
    text = f"{seed}/{config.name}/{start}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return draw_rows(config, count, int.from_bytes(digest, "little"))


def draw_rows(config: BaseEmbeddingConfig, count: int, seed: int) -> Tensor:
    """Draws rows of a table by its ``init_fn``, (count, D), and leaves all random states as they were."""
    rows = torch.empty(count, config.embedding_dim)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed every GPU's generator, which is not forked
        # here, and take .1 ms.
        torch.default_generator.manual_seed(seed)
        assert config.init_fn is not None  # TorchRec fills it in
        config.init_fn(rows)
    return rows
