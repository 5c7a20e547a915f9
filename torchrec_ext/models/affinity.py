"""How much features have to do with one another: from a trained model's vectors, or from the data alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.tower import Tower

Measure = Literal["cosine", "cka"]


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """The affinity of every pair of features.

    Args:
        features: F names.
        values: (F, F) float64, symmetric, 0 (nothing in common) to 1 (on the diagonal).
    """

    features: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        size = len(self.features)
        if self.values.shape != (size, size):
            raise ValueError(f"values: shape {tuple(self.values.shape)}, must be ({size}, {size}) for {size} features")
        if not torch.isfinite(self.values).all() or self.values.min() < 0 or self.values.max() > 1 + 1e-9:
            raise ValueError(
                f"values: from {float(self.values.min()):.3g} to {float(self.values.max()):.3g}, must be 0 to 1 and finite"
            )
        if not torch.allclose(self.values, self.values.T):
            raise ValueError("values: the affinity of i with j differs from that of j with i; give a symmetric matrix")


def affinity(vectors: Mapping[str, Tensor], measure: Measure = "cosine") -> Affinity:
    """The affinity of features from the vectors that each has in the same B rows.

    Args:
        vectors: by feature (B, D), such as from :func:`pooled_vectors` or :func:`id_vectors`.
        measure: ``cosine``, the mean over the rows of |cos| of two features' vectors, as DMT probes a model whose features meet in
            dot products; all D must be equal. ``cka``, how alike two features order the rows (linear CKA, Kornblith et al. 2019,
            without its bias, Song et al. 2012): any D, and the same whatever basis a table has been trained to.

    Raises:
        ValueError: fewer than 2 features or 4 rows, or widths that differ under ``cosine``.
    """
    if measure not in get_args(Measure):
        raise ValueError(f"measure={measure!r}: must be one of {', '.join(get_args(Measure))}")
    rows = {len(each) for each in vectors.values()}
    if len(vectors) < 2 or len(rows) != 1 or min(rows) < 4:
        raise ValueError(
            f"vectors: {len(vectors)} features of {sorted(rows)} rows; needs 2 features or more, of the same 4 rows or more"
        )
    own = [each.detach().double() for each in vectors.values()]
    values = _cosine(list(vectors), own) if measure == "cosine" else _cka(own)
    return Affinity(features=tuple(vectors), values=values.clamp(0, 1).fill_diagonal_(1))


def _cosine(names: Sequence[str], vectors: Sequence[Tensor]) -> Tensor:
    widths = {name: each.shape[1] for name, each in zip(names, vectors, strict=True)}
    if len(set(widths.values())) > 1:
        raise ValueError(f"vectors: widths {widths} differ, and a cosine needs equal ones; use measure='cka'")
    unit = torch.nn.functional.normalize(torch.stack(list(vectors)), dim=2)  # (F, B, D)
    total = unit.new_zeros(len(unit), len(unit))
    for rows in torch.split(unit, 256, dim=1):  # (F, F, rows) at a time
        total += torch.einsum("ird,jrd->ijr", rows, rows).abs().sum(dim=2)
    return total / unit.shape[1]


def _cka(vectors: Sequence[Tensor]) -> Tensor:
    """From the products of columns with columns: in matrices of rows with rows, whose diagonals do not count, B is squared."""
    count, widths = len(vectors[0]), [each.shape[1] for each in vectors]
    beside = torch.cat([each - each.mean(dim=0) for each in vectors], dim=1)  # (B, C)
    owner = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    by_feature = torch.nn.functional.one_hot(owner, len(widths)).double()  # (C, F)
    norms = beside.square() @ by_feature  # (B, F): the diagonals
    sums = (beside * beside.sum(dim=0)) @ by_feature - norms  # (B, F): the rows without them
    products = by_feature.T @ (beside.T @ beside).square() @ by_feature - norms.T @ norms
    totals = sums.sum(dim=0)
    common = products + torch.outer(totals, totals) / ((count - 1) * (count - 2)) - 2 / (count - 2) * sums.T @ sums
    scale = common.diagonal().clamp(min=1e-12).sqrt()
    return common / torch.outer(scale, scale)


def pooled_vectors(model: nn.Module, batches: Iterable[TowerBatch]) -> dict[str, Tensor]:
    """By feature (B, D) what the model's EmbeddingBagCollections return for ``batches``, sharded or not, B the rows of all of them.

    Features of a shared tower have fewer rows than the others and are repeated as the model repeats them. Of a sharded model every
    rank must call it; it sees its own rows.

    Raises:
        ValueError: no batch, or no collection that pools.
    """
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad(), _recorded(model) as seen:
        for batch in batches:
            seen.clear()
            model(batch)
            for feature, value in seen.items():
                rows = value[batch.shared.index] if batch.shared is not None and len(value) != len(batch) else value
                found.setdefault(feature, []).append(rows.cpu())
    if not found:
        raise ValueError("model: nothing pooled was looked up; give batches, and a model with EmbeddingBagCollections")
    return {feature: torch.cat(parts) for feature, parts in found.items()}


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What collections return while the block runs, by feature."""
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        seen.update(output.to_dict())

    kinds = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
    pooling = [module for module in model.modules() if isinstance(module, kinds)]
    handles = [module.register_forward_hook(keep) for module in pooling]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def id_vectors(batch: TowerBatch, features: Sequence[str], width: int = 128) -> dict[str, Tensor]:
    """By feature (B, width) the mean over a bag of a fixed random vector for each id: what the data says before any training.

    With the measure ``cka`` the affinity is how far two features' ids come together, whatever the ids are.
    """
    vectors = {}
    for seed, feature in enumerate(features):
        bags = batch.bags(feature)
        ids, place = torch.unique(bags.values(), return_inverse=True)
        drawn = torch.randn(len(ids), width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        lengths = bags.lengths()
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths.cpu())
        sums = torch.zeros(len(lengths), width, dtype=torch.float64).index_add_(0, rows, drawn[place.cpu()])
        mean = sums / lengths.cpu().clamp(min=1)[:, None]
        shared = batch.shared is not None and len(mean) != len(batch)
        vectors[feature] = mean[batch.shared.index.cpu()] if shared else mean  # type: ignore[union-attr]
    return vectors


def table_bytes(towers: Iterable[Tower]) -> dict[str, float]:
    """By feature the bytes of its table as float32, those of a table that several features read dealt out to them evenly."""
    loads = {}
    for tower in towers:
        for table in tower.tables:
            for feature in table.feature_names:
                loads[feature] = 4.0 * table.num_embeddings * table.embedding_dim / len(table.feature_names)
    return loads
