"""Which features stand in which tower, and what a tower's output is compressed to, as keys of a recipe say."""

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
from torchrec_ext.models.affinity import affinity, id_vectors
from torchrec_ext.models.partition import partition
from torchrec_ext.modules.compression import Compression
from torchx_apps.overrides import apply_overrides

ROWS = 4096  # that affinities are taken from


def compression_of(text: str) -> Compression | None:
    """``model.compress``: settings of a :class:`Compression`, such as ``dim=16,flat=2``; None for nothing.

    Example:
        >>> compression_of("kind=cross,dim=8,per_feature=1")
        Compression(kind='cross', dim=8, per_feature=1, flat=1, layers=1)
        >>> compression_of("dims=8")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: model.compress=dims=8: there is no key 'dims'; did you mean 'dim'? Keys here: ...
    """
    if not text:
        return None
    try:
        return apply_overrides(Compression(), text.split(","))
    except ValueError as error:
        raise ValueError(f"model.compress={str(error).removeprefix('--set ')}") from None


def check_towers(text: str) -> None:
    """``model.towers``: nothing, a number, or features.

    Raises:
        ValueError: another text.
    """
    if text.isdecimal() and int(text) < 1:
        raise ValueError(f"model.towers={text}: must be 1 or more")
    if text and not text.isdecimal() and not all(all(group.split("+")) for group in text.split(",")):
        raise ValueError(f"model.towers={text}: give a number of towers, or their features, such as user_id+city,item_id+daytime")


def features_by_tower(
    asked: str, features: Sequence[str], rows: Chunk, sizes: Mapping[str, float], *, trained: str = "", bound: float = 0.0
) -> dict[str, list[str]]:
    """The features of each tower.

    Args:
        asked: as :func:`check_towers` takes it: a number has the partitioner of Disaggregated Multi-Tower group the features by
            affinity, text says itself who stands together.
        features: all of them.
        rows: of the training, which affinities are taken from.
        sizes: bytes of each feature's table.
        trained: safetensors of a model whose tables have the features' names: affinities are then those of what it has learned,
            in place of those of ids that come together.
        bound: of the bytes of a tower; 1.1 times an even share where 0.

    Raises:
        ValueError: features that are not there, stand twice or nowhere; or no grouping keeps the bound.
    """
    if not asked.isdecimal():
        return _listed(asked, features)
    place = np.linspace(0, rows.num_rows - 1, min(ROWS, rows.num_rows)).astype(np.int64)
    ids = {name: torch.from_numpy(rows[name].take(place).values.astype(np.int64)) for name in features}
    vectors = _learned(Path(trained), ids) if trained else id_vectors(_batch(ids), features)
    found = partition(affinity(vectors, "cka"), towers=int(asked), load=sizes, bound=bound or None)
    if os.environ.get("RANK", "0") == "0":
        print(f"features by affinity:\n{found}\n", flush=True)
    return {tower: list(names) for tower, names in found.groups.items()}


def _listed(asked: str, features: Sequence[str]) -> dict[str, list[str]]:
    groups = [group.split("+") for group in asked.split(",")]
    given = [name for group in groups for name in group]
    if unknown := [name for name in given if name not in features]:
        raise ValueError(f"model.towers={asked}: there is no feature '{unknown[0]}'; the features are {', '.join(features)}")
    if twice := [name for name in given if given.count(name) > 1]:
        raise ValueError(f"model.towers={asked}: '{twice[0]}' stands there twice; a feature is in one tower")
    if missing := [name for name in features if name not in given]:
        raise ValueError(f"model.towers={asked}: '{missing[0]}' stands in no tower; give each of {', '.join(features)} one")
    return {f"tower_{number}": group for number, group in enumerate(groups)}


def _learned(trained: Path, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from safetensors import safe_open

    if not trained.is_file():
        raise ValueError(f"model.towers_from={trained}: there is no such file; write one with `python -m torchx_apps.publish RUN`")
    vectors = {}
    with safe_open(trained, framework="pt") as held:
        paths = {path.split(".")[-2]: path for path in held.keys() if "embedding" in path}  # noqa: SIM118
        for name, own in ids.items():
            if name not in paths:
                raise ValueError(
                    f"model.towers_from={trained}: it has no table '{name}'; its tables are {', '.join(sorted(paths))}"
                )
            table = held.get_tensor(paths[name])
            if len(table) <= int(own.max()):
                raise ValueError(
                    f"model.towers_from={trained}: table '{name}' has {len(table):,} rows, the data ids up to {own.max():,}"
                )
            vectors[name] = table[own]
    return vectors


def _batch(ids: Mapping[str, Tensor]) -> TowerBatch:
    count = len(next(iter(ids.values())))
    lengths = torch.ones(count * len(ids), dtype=torch.int32)
    sparse = KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths)
    none = torch.empty(count, 0)
    return TowerBatch(sparse=sparse, dense=none, labels=none, weights=none, total_weight=none)
