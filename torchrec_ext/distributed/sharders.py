"""sharders(): TorchRec's sharders for every kind of collection that a tower may hold.

refused_because(): what FBGEMM's kernels cannot do with a table, known before a plan is made.

ShardedBags, ShardedSequences: TorchRec's sharded collections with the order of features of the unsharded ones.
ShardedBags also has MEAN pooling for every sharding type.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    _apply_mean_pooling,
)
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import (
    Awaitable,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_ext.schema.validation import listed

TRAINED_ON_CPU = (DataType.FP32, DataType.FP16)
SHARDED = [
    kind.value for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL
]
BY_HOST = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
# These types reduce-scatter: the exchange adds up the messages of the ranks.
SUMMED = (ShardingType.ROW_WISE.value, *BY_HOST)


def refused_because(
    table: BaseEmbeddingConfig, sharding: str, device: str
) -> str | None:
    """Explains why a table cannot be trained on a device under a sharding type.

    Args:
        table: configuration of the table.
        sharding: sharding type, ``auto`` included.
        device: ``cpu`` or ``cuda``.

    Returns:
        The reason; None if it can, or where FBGEMM itself refuses: which types its CUDA kernels train differs by
        version.
    """
    if table.embedding_dim % 4:
        return f"embedding_dim={table.embedding_dim} must be a multiple of 4, as FBGEMM's kernels ask"
    if device == "cpu" and table.data_type not in TRAINED_ON_CPU:
        names = " and ".join(kind.value for kind in TRAINED_ON_CPU)
        return f"data_type={table.data_type.value}: FBGEMM's kernels train {names} tables on a cpu; choose one of them"
    if sharding != ShardingType.DATA_PARALLEL.value:
        return None
    others = "choose table_wise, row_wise or column_wise for it, with an optimizer that runs there"
    if table.data_type != DataType.FP32:
        return (
            f"data_type={table.data_type.value} as data_parallel: its optimizer would keep its state in half "
            f"precision, where eps=1e-8 is 0 and rows become NaN; {others}"
        )
    if isinstance(table, EmbeddingConfig) and device == "cpu":
        return (
            "data_parallel on a cpu: it is read id by id, where FBGEMM's dense kernel adds up the ids of a row and "
            f"then fails; {others}"
        )
    return None


def possible(table: BaseEmbeddingConfig, device: str) -> list[str] | None:
    """Returns the sharding types for ``auto`` to choose from for ``table``; None for all types of the sharder."""
    if refused_because(table, ShardingType.DATA_PARALLEL.value, device) is None:
        return None
    return free_to_shard(device)


def free_to_shard(device: str) -> list[str]:
    """Returns the types for a planner on ``cpu`` or ``cuda`` to choose from if none is requested.

    On a CPU these are without the types by host, whose one gain is the bandwidth within a host of GPUs.
    """
    return [kind for kind in SHARDED if device != "cpu" or kind not in BY_HOST]


class _AsUnsharded:
    """Mix-in to a sharded collection of TorchRec that has its outputs pass through ``_as_unsharded``.

    Attributes:
        before_backward: called with the gradient of each output; None for nothing.
    """

    before_backward: Callable[[Tensor], None] | None = None
    _keys: list[str] | None = None

    def _with_same_keys(
        self, features: KeyedJaggedTensor | TensorDict
    ) -> KeyedJaggedTensor:
        """Returns a batch with the keys of the first one, whose places TorchRec's input dist remembers."""
        features = maybe_td_to_kjt(features)
        keys = features.keys()
        if self._keys is None:
            self._keys = keys
        if keys == self._keys:
            return features
        missing = [name for name in self._keys if name not in keys]
        if missing:
            raise ValueError(
                f"the batch lacks the features {listed(missing)} of the first one; it has {listed(keys)}: give each "
                "batch all of them"
            )
        return features.permute([keys.index(name) for name in self._keys])

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Runs TorchRec's output dist, and makes its result that of the unsharded collection."""
        return self._as_unsharded(super().output_dist(ctx, output), ctx)  # type: ignore[misc]

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:  # noqa: A002
        """Runs TorchRec's look-up and output dist, and makes its result that of the unsharded collection."""
        return self._as_unsharded(super().compute_and_output_dist(ctx, input), ctx)  # type: ignore[misc]

    def _as_unsharded(self, outputs: Any, ctx: Any) -> Any:
        raise NotImplementedError


class ShardedBags(_AsUnsharded, ShardedEmbeddingBagCollection):
    """TorchRec's ShardedEmbeddingBagCollection with the outputs and gradients of the unsharded collection.

    TorchRec 1.8 sums the bags of row-wise tables pooled by MEAN and divides them afterwards. It divides every other bag
    of the collection too, which other sharding types have already divided; it exempts row-wise SUM tables, but only at
    each feature's first occurrence; and it cannot divide the bags of a rank without rows. Here a column of a row-wise
    MEAN table is divided by the lengths of its feature's bags, and no other column is. Weights of ids are read only if
    the collection is weighted.

    TorchRec returns the features in the order of the plan, so ``values()`` would mean other columns under another plan.
    Here they are in the order of the tables, as unsharded; columns that are in order are not copied.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        means = [
            t.name for t in self._embedding_bag_configs if t.pooling == PoolingType.MEAN
        ]
        if self._is_weighted and means:
            raise ValueError(
                f"tables {listed(means)}: pooled by MEAN with weights, whose gradient by FBGEMM is wrong on a CPU; "
                "pool by SUM"
            )
        # Switches TorchRec's own division off.
        self._has_mean_pooling_callback = False
        divided = self._row_wise_means()
        self._means = [name in divided for name in self._embedding_names]
        names = _unsharded_order(self._embedding_bag_configs)
        self._order = [self._embedding_names.index(name) for name in names]
        group = self._env.process_group
        if group is not None and dist.get_backend(group) == "gloo":
            for output_dist in self._output_dists:
                if isinstance(
                    output_dist,
                    RwPooledEmbeddingDist
                    | TwRwPooledEmbeddingDist
                    | GridPooledEmbeddingDist,
                ):
                    output_dist.register_forward_pre_hook(_refuse_unequal_batches)

    def _row_wise_means(self) -> set[str]:
        """Returns the names of the outputs that arrive as sums and must become means."""
        configs = self._embedding_bag_configs
        means: set[str] = set()
        for config, names in zip(
            configs, get_embedding_names_by_table(configs), strict=True
        ):
            sharding = self.module_sharding_plan[config.name]
            if config.pooling == PoolingType.MEAN and sharding.sharding_type in SUMMED:
                means |= set(names)
        return means

    def input_dist(
        self,
        ctx: EmbeddingBagCollectionContext,
        features: KeyedJaggedTensor | TensorDict,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts TorchRec's input dist of what the tables read, and keeps the divisors of this batch in ``ctx``."""
        features = self._with_same_keys(features)
        if not self._is_weighted and features.weights_or_none() is not None:
            # FBGEMM's kernels would weigh each id.
            features = copy.copy(features)
            features._weights = None
        if any(self._means):
            if features.variable_stride_per_key():
                raise ValueError(
                    "row_wise tables pooled by MEAN: a batch size for each feature is not supported; pool by SUM, or "
                    "shard table_wise"
                )
            ctx.divisor = self._divisor(features)
        return super().input_dist(ctx, features)

    @torch.no_grad()
    def _divisor(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns (B, sum of D) divisors: lengths of the bags; 1 if nothing is divided."""
        lengths = features.lengths().split(features.stride_per_key())
        by_key = dict(zip(features.keys(), lengths, strict=True))
        ones = torch.ones_like(next(iter(by_key.values())), dtype=torch.float32)
        columns = []
        for name, mean in zip(self._embedding_names, self._means, strict=True):
            # TorchRec names an output FEATURE@TABLE if several tables read the feature.
            feature = name.split("@")[0]
            divisor = ones
            # 1e-6 keeps the 0 of an empty bag.
            if mean:
                divisor = by_key[feature] + 1e-6
            columns.append(divisor)
        return torch.stack(columns, dim=1).repeat_interleave(
            self._dim_per_key, dim=1, output_size=sum(self._embedding_dims)
        )

    def _as_unsharded(self, sums: Any, ctx: Any) -> Any:
        if ctx.divisor is not None:
            sums.callbacks.append(
                functools.partial(_apply_mean_pooling, divisor=ctx.divisor)
            )
        if self._order != sorted(self._order):
            sums.callbacks.append(functools.partial(_ordered, order=self._order))
        if self.before_backward is not None:
            sums.callbacks.append(self._watched)
        return sums

    def _watched(self, output: KeyedTensor) -> KeyedTensor:
        values = output.values()
        if values.requires_grad:
            values.register_hook(self.before_backward)
        return output


def _unsharded_order(
    configs: list[EmbeddingBagConfig] | list[EmbeddingConfig],
) -> list[str]:
    """Returns the names of the outputs in the order of the unsharded collection."""
    return list(chain.from_iterable(get_embedding_names_by_table(configs)))


def _ordered(output: KeyedTensor, order: list[int]) -> KeyedTensor:
    keys = output.keys()
    widths = output.length_per_key()
    columns = output.values().split(widths, dim=1)
    return KeyedTensor(
        keys=[keys[number] for number in order],
        length_per_key=[widths[number] for number in order],
        values=torch.cat([columns[number] for number in order], dim=1),
        key_dim=1,
    )


class ShardedSequences(_AsUnsharded, ShardedEmbeddingCollection):
    """TorchRec's ShardedEmbeddingCollection with the features in the order of the unsharded collection.

    TorchRec returns a dict in the order of the plan, so a loop over its values would mean other features under another
    plan.
    """

    def input_dist(
        self, ctx: Any, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts TorchRec's input dist."""
        return super().input_dist(ctx, self._with_same_keys(features))

    def _as_unsharded(self, rows: Any, ctx: Any) -> Any:
        rows.callbacks.append(self._ordered)
        return rows

    def _ordered(self, rows: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        ordered = {
            name: rows[name] for name in _unsharded_order(self._embedding_configs)
        }
        if self.before_backward is not None:
            for feature in ordered.values():
                if feature.values().requires_grad:
                    feature.values().register_hook(self.before_backward)
        return ordered


def _refuse_unequal_batches(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuses batches whose gradients gloo cannot gather; a hook before a row-wise output dist."""
    sizes = inputs[1].batch_size_per_rank if len(inputs) > 1 and inputs[1] else []
    if len(set(sizes)) > 1 and torch.is_grad_enabled():
        raise ValueError(
            f"row_wise tables over gloo: ranks have batches of {listed(map(str, sizes))} rows; drop or pad "
            "the last ones, or shard table_wise"
        )


class RowWiseOnCpu(BaseEmbeddingSharder):
    """Mix-in to make our sharded modules, and to add row_wise to the sharding types of a sharder on the CPU.

    TorchRec's kernels and collectives support it there, its own list leaves it out (torchrec #1252, #1396).
    """

    adds: tuple[str, ...] = (ShardingType.ROW_WISE.value,)
    # An argument that TorchRec's sharder has of its own, and passes to its sharded module.
    option = ""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types for a device type, row_wise among them."""
        types: list[str] = super().sharding_types(compute_device_type)
        return [*types, *(kind for kind in self.adds if kind not in types)]

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards ``module`` as TorchRec's sharder does, which would make a module of its own class."""
        return self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **{self.option: getattr(self, f"_{self.option}")},
        )


class BagSharder(RowWiseOnCpu, EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, with row_wise on the CPU too; makes :class:`ShardedBags`.

    Args:
        by_host: whether a planner may choose the types by host on a CPU, where the tables' constraints name them.
        arguments: arguments of TorchRec's sharder.
        named: further arguments of TorchRec's sharder.
    """

    option = "sharded_module_order_overwrite"

    def __init__(self, *arguments: Any, by_host: bool = False, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if by_host:
            self.adds = SUMMED

    @property
    def sharded_module_type(self) -> type[ShardedBags]:
        """Class of the sharded module: :class:`ShardedBags`."""
        return ShardedBags


class SequenceSharder(RowWiseOnCpu, EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection, with row_wise on the CPU too; makes :class:`ShardedSequences`."""

    option = "use_index_dedup"

    @property
    def sharded_module_type(self) -> type[ShardedSequences]:
        """Class of the sharded module: :class:`ShardedSequences`."""
        return ShardedSequences


def sharders(*, by_host: bool = False) -> list[ModuleSharder[nn.Module]]:
    """Returns a sharder for every kind of collection in a tower.

    Args:
        by_host: whether a planner may choose the types by host on a CPU, where the tables' constraints name them.
    """
    return [BagSharder(by_host=by_host), SequenceSharder()]
