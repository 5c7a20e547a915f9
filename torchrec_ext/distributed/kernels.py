"""What FBGEMM's kernels and TorchRec cannot do with a table, known before a plan is made."""

from __future__ import annotations

from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingConfig

TRAINED_ON_CPU = (DataType.FP32, DataType.FP16)
SHARDED = [kind.value for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]


def refused_because(table: BaseEmbeddingConfig, sharding: str, device: str) -> str | None:
    """Why ``table`` cannot be trained on a ``device`` (``cpu`` or ``cuda``) as ``sharding``, ``auto`` included.

    None where it can, or where FBGEMM itself says no: which types its CUDA kernels train differs by version.
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
            f"data_type={table.data_type.value} as data_parallel: its optimizer would keep its state in half precision, where "
            f"eps=1e-8 is 0 and rows become NaN; {others}"
        )
    if isinstance(table, EmbeddingConfig) and device == "cpu":
        return (
            "data_parallel on a cpu: it is read id by id, where FBGEMM's dense kernel adds up the ids of a row and then fails; "
            f"{others}"
        )
    return None


def possible(table: BaseEmbeddingConfig, device: str) -> list[str] | None:
    """The sharding types that ``auto`` may choose from for ``table``; None for all that the sharder offers."""
    if refused_because(table, ShardingType.DATA_PARALLEL.value, device) is None:
        return None
    return list(SHARDED)
