"""features_by_tower(): which features are in which tower of the recipe n_tower, as listed or by affinity.

columns_by_name(): which columns are in which tower, by their names. A file of its own, because it imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk
from torchrec_ext.models.partition import affinity, id_vectors, partition
from torchrec_ext.schema.validation import listed

# Rows for the affinities of features.
ROWS = 4096


def features_by_tower(
    towers: str,
    features: Sequence[str],
    rows: Chunk,
    sizes: Mapping[str, float],
    *,
    tables: Mapping[str, str] | None = None,
    trained: str = "",
    bound: float = 0.0,
) -> dict[str, list[str]]:
    """Returns the names of each tower's features, by tower.

    Args:
        towers: text of ``model.towers``: for a number the partitioner of Disaggregated Multi-Tower groups the features
            by affinity; other text lists the features of each tower.
        features: names of all features.
        rows: training rows from which affinities are computed, such as :data:`ROWS`.
        sizes: bytes of each feature's table.
        tables: name of each feature's table, by feature; by default the feature's own.
        trained: safetensors file of a model of these tables: affinities are then computed from its vectors, instead of
            from the ids that occur together.
        bound: greatest number of bytes of a tower; 1.1 times an even share where 0.

    Raises:
        ValueError: a feature is unknown, listed twice or not listed; or no grouping keeps the bound.
    """
    if not towers.isdecimal():
        return _listed(towers, features)
    if lists := [name for name in features if rows[name].ragged]:
        raise ValueError(
            f"model.towers={towers}: column '{lists[0]}' has lists, and features are grouped by one id of a row; name "
            "the columns of each tower, such as 'user:user_id,city item:item_id'"
        )
    ids = {name: torch.from_numpy(rows[name].values.astype(np.int64)) for name in features}
    vectors = _learned(Path(trained), ids, tables or {}) if trained else id_vectors(_batch(ids), features)
    result = partition(affinity(vectors, "cka"), towers=int(towers), load=sizes, bound=bound or None)
    if os.environ.get("RANK", "0") == "0":
        print(f"features by affinity:\n{result}\n", flush=True)
    return {tower: list(names) for tower, names in result.groups.items()}


def columns_by_name(
    towers: Mapping[str, Sequence[str]], features: Sequence[str], dense: Sequence[str]
) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """Returns the names of each tower's features and of its dense columns, by tower.

    Args:
        towers: names or patterns of each tower's columns, by tower; see ``model.towers``.
        features: names of all features.
        dense: names of all dense columns.

    Raises:
        ValueError: a name or pattern is that of no column, or a column is in two towers, or in none.
    """
    columns = (*features, *dense)
    owner: dict[str, str] = {}
    for tower, patterns in towers.items():
        for pattern in patterns:
            matches = [name for name in columns if fnmatchcase(name, pattern)]
            if not matches:
                raise ValueError(
                    f"model.towers: tower '{tower}' names '{pattern}', which no column is; the columns are "
                    f"{listed(columns)}"
                )
            for name in matches:
                if owner.setdefault(name, tower) != tower:
                    raise ValueError(
                        f"model.towers: column '{name}' is in the towers '{owner[name]}' and '{tower}'; a column is in "
                        "one tower"
                    )
    if missing := [name for name in columns if name not in owner]:
        raise ValueError(
            f"model.towers: column '{missing[0]}' stands in no tower ({len(missing)} such columns); name it, or a "
            f"pattern, such as {next(iter(towers))}:{missing[0]}"
        )

    def of_tower(tower: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if owner[name] == tower]

    return {tower: (of_tower(tower, features), of_tower(tower, dense)) for tower in towers}


def _listed(towers: str, features: Sequence[str]) -> dict[str, list[str]]:
    groups = [group.split("+") for group in towers.split(",")]
    listed_names = [name for group in groups for name in group]
    unknown = [name for name in listed_names if name not in features]
    twice = [name for name in listed_names if listed_names.count(name) > 1]
    missing = [name for name in features if name not in listed_names]
    if unknown:
        raise ValueError(
            f"model.towers={towers}: there is no feature '{unknown[0]}'; the features are {listed(features)}"
        )
    if twice:
        raise ValueError(f"model.towers={towers}: '{twice[0]}' stands there twice; a feature is in one tower")
    if missing:
        raise ValueError(
            f"model.towers={towers}: '{missing[0]}' stands in no tower; give each of {listed(features)} one"
        )
    return {f"tower_{number}": group for number, group in enumerate(groups)}


def _learned(trained: Path, ids: Mapping[str, Tensor], tables: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    if not trained.is_file():
        raise ValueError(
            f"model.towers_from={trained}: there is no such file; write one with `python -m torchx_apps.publish RUN`"
        )
    vectors = {}
    with safe_open(trained, framework="pt") as file:
        paths = {path.split(".")[-2]: path for path in file.keys() if "embedding" in path}  # noqa: SIM118
        for name, rows in ids.items():
            table_name = tables.get(name, name)
            if table_name not in paths:
                raise ValueError(
                    f"model.towers_from={trained}: it has no table '{table_name}'; its tables are "
                    f"{listed(sorted(paths))}"
                )
            table = file.get_tensor(paths[table_name])
            if len(table) <= int(rows.max()):
                raise ValueError(
                    f"model.towers_from={trained}: table '{table_name}' has {len(table):,} rows, the data ids up to "
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
