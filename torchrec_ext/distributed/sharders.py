"""sharders(): TorchRec's sharders for every kind of collection that a tower may hold."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

_SUMMED_FIRST = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class RowWiseOnCpu(BaseEmbeddingSharder):
    """Adds row_wise to what a sharder offers on the CPU.

    TorchRec's kernels and collectives support it there, its own list leaves it out (torchrec #1252, #1396).
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types for this device."""
        types: list[str] = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]


class BagSharder(RowWiseOnCpu, EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, with row_wise on the CPU too, and with means that are divided once.

    TorchRec 1.8 sums the bags of row-wise tables pooled by MEAN and divides them afterwards, and with them every bag of the
    collection but those of row-wise SUM tables; other sharding types have divided by then.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """See TorchRec's.

        Raises:
            ValueError: a row-wise table pooled by MEAN and one of another sharding type read one feature.
        """
        sharded = super().shard(module, params, env, device, module_fqn)
        summed = sharded._pooling_type_to_rs_features
        if PoolingType.MEAN.value in summed:
            configs = module.embedding_bag_configs()
            divided = [table for table in configs if params[table.name].sharding_type not in _SUMMED_FIRST]
            _check_apart(divided, set(summed[PoolingType.MEAN.value]))
            summed[PoolingType.SUM.value].extend(feature for table in divided for feature in table.feature_names)
        return sharded


def _check_apart(divided: list[EmbeddingBagConfig], means: set[str]) -> None:
    for table in divided:
        if both := means.intersection(table.feature_names):
            raise ValueError(
                f"feature '{min(both)}' is read by a row-wise table pooled by MEAN and by table '{table.name}' of another sharding "
                "type, which TorchRec divides by one length; give both tables one sharding type, as in "
                f"plan.tables={table.name}=row_wise"
            )


class SequenceSharder(RowWiseOnCpu, EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection, with row_wise on the CPU too."""


def sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders for every kind of collection that a tower may hold."""
    return [BagSharder(), SequenceSharder()]
