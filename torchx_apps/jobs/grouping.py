"""features_by_tower(): which features are in which tower of the recipe n_tower, as listed or by affinity."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk
from torchrec_ext.models.partition import affinity, id_vectors, partition

ROWS = 4096  # number of rows from which affinities are computed


def features_by_tower(
    towers: str,
    features: Sequence[str],
    rows: Chunk,
    sizes: Mapping[str, float],
    *,
    trained: str = "",
    bound: float = 0.0,
) -> dict[str, list[str]]:
    """Returns the names of each tower's features, by tower.

    Args:
        towers: text of ``model.towers``: for a number the partitioner of Disaggregated Multi-Tower groups the features
            by affinity; other text lists the features of each tower.
        features: names of all features.
        rows: training rows from which affinities are computed.
        sizes: bytes of each feature's table.
        trained: safetensors file of a model whose tables have the features' names: affinities are then computed from
            its vectors, instead of from the ids that occur together.
        bound: greatest number of bytes of a tower; 1.1 times an even share where 0.

    Raises:
        ValueError: a feature is unknown, listed twice or not listed; or no grouping keeps the bound.
    """
    if not towers.isdecimal():
        return _listed(towers, features)
    sample = np.linspace(0, rows.num_rows - 1, min(ROWS, rows.num_rows)).astype(np.int64)
    ids = {name: torch.from_numpy(rows[name].take(sample).values.astype(np.int64)) for name in features}
    vectors = _learned(Path(trained), ids) if trained else id_vectors(_batch(ids), features)
    result = partition(affinity(vectors, "cka"), towers=int(towers), load=sizes, bound=bound or None)
    if os.environ.get("RANK", "0") == "0":
        print(f"features by affinity:\n{result}\n", flush=True)
    return {tower: list(names) for tower, names in result.groups.items()}


def _listed(towers: str, features: Sequence[str]) -> dict[str, list[str]]:
    groups = [group.split("+") for group in towers.split(",")]
    given = [name for group in groups for name in group]
    unknown = [name for name in given if name not in features]
    twice = [name for name in given if given.count(name) > 1]
    missing = [name for name in features if name not in given]
    if unknown:
        raise ValueError(
            f"model.towers={towers}: there is no feature '{unknown[0]}'; the features are {', '.join(features)}"
        )
    if twice:
        raise ValueError(f"model.towers={towers}: '{twice[0]}' stands there twice; a feature is in one tower")
    if missing:
        raise ValueError(
            f"model.towers={towers}: '{missing[0]}' stands in no tower; give each of {', '.join(features)} one"
        )
    return {f"tower_{number}": group for number, group in enumerate(groups)}


def _learned(trained: Path, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from safetensors import safe_open

    if not trained.is_file():
        raise ValueError(
            f"model.towers_from={trained}: there is no such file; write one with `python -m torchx_apps.publish RUN`"
        )
    vectors = {}
    with safe_open(trained, framework="pt") as file:
        paths = {path.split(".")[-2]: path for path in file.keys() if "embedding" in path}  # noqa: SIM118
        for name, rows in ids.items():
            if name not in paths:
                raise ValueError(
                    f"model.towers_from={trained}: it has no table '{name}'; its tables are {', '.join(sorted(paths))}"
                )
            table = file.get_tensor(paths[name])
            if len(table) <= int(rows.max()):
                raise ValueError(
                    f"model.towers_from={trained}: table '{name}' has {len(table):,} rows, the data ids up to "
                    f"{rows.max():,}"
                )
            vectors[name] = table[rows]
    return vectors


def _batch(ids: Mapping[str, Tensor]) -> TowerBatch:
    count = len(next(iter(ids.values())))
    lengths = torch.ones(count * len(ids), dtype=torch.int32)
    sparse = KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths)
    none = torch.empty(count, 0)
    return TowerBatch(sparse=sparse, dense=none, labels=none, weights=none, total_weight=none)
