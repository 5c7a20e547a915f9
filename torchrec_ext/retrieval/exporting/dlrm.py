"""DLRMByColumns: TorchRec's DLRM with a forward from columns, to split it into towers."""

from __future__ import annotations

import copy
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import pyarrow as pa
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.batch import skip_fx_notice
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.schema.validation import listed

_DENSE = "dense_features"  # DLRM's own name of its argument


class DLRMByColumns(nn.Module):
    """A DLRM with a forward from a dict of columns: ``dense_features``, and each sparse feature by its name.

    Only a trace looks up column by column, since a KeyedJaggedTensor would mix ids of queries and items. So an export
    compares the bundle with the DLRM itself.

    Args:
        dlrm: unsharded DLRM, with each feature read once.
    """

    look_ups: _LookUps
    dlrm: DLRM

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        look_ups = _LookUps(dlrm.sparse_arch.embedding_bag_collection)
        # The same layers with other look-ups, so that any subclass keeps its forward.
        self.by_columns = copy.copy(dlrm)
        vars(self.by_columns)["_modules"] = {**dlrm._modules, "sparse_arch": look_ups}
        # Not submodules of this one: they have the same weights.
        self.__dict__.update(look_ups=look_ups, dlrm=dlrm)

    def forward(self, columns: dict[str, Tensor]) -> Tensor:
        """Returns (B, 1) logits."""
        if torch.compiler.is_compiling():
            return self.by_columns(columns[_DENSE], columns)  # type: ignore[no-any-return]
        features = self.look_ups.features
        values = []
        lengths = []
        for name in features:
            ids = columns[name]
            values.append(ids.flatten())
            # Rows of a column have lists of one length, or one id.
            lengths.append(torch.full((len(ids),), ids[0].numel(), dtype=torch.int32))
        keyed = KeyedJaggedTensor(
            features, torch.cat(values), lengths=torch.cat(lengths)
        )
        return self.dlrm(columns[_DENSE], keyed)  # type: ignore[no-any-return]


class _LookUps(nn.Module):
    """The bags of an EmbeddingBagCollection from columns of ids, (B,) or (B, L), to (B, F, D)."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        configs = collection.embedding_bag_configs()
        self.features: list[str] = []
        self.places: list[int] = []  # position of each feature's table
        self._means: list[bool] = []
        weights: list[Any] = []
        for place, config in enumerate(configs):
            self.features += config.feature_names
            self.places += [place] * len(config.feature_names)
            self._means.append(config.pooling is PoolingType.MEAN)
            weights.append(collection.embedding_bags[config.name].weight)
        self.tables = nn.ModuleList(map(nn.Embedding.from_pretrained, weights))

    def forward(self, columns: dict[str, Tensor]) -> Tensor:
        pooled = []
        for name, place in zip(self.features, self.places, strict=True):
            rows = self.tables[place](columns[name])
            if rows.dim() == 3 and self._means[place]:
                rows = rows.mean(1)
            elif rows.dim() == 3:
                rows = rows.sum(1)
            pooled.append(rows)
        return torch.stack(pooled, 1)


def dlrm_by_columns(
    model: nn.Module, queries: pa.Table, catalogue: pa.Table
) -> tuple[DLRMByColumns, dict[str, list[str]]] | None:
    """Returns a DLRM or DLRMTrain by columns, and its towers' modules; None for other models.

    Args:
        model: unsharded model.
        queries: rows of the columns of queries.
        catalogue: rows of the columns of items.

    Raises:
        BundleError: a feature is no column, or all are of one table.
    """
    dlrm = model.model if isinstance(model, DLRMTrain) else model
    if not isinstance(dlrm, DLRM) or not isinstance(
        dlrm.sparse_arch.embedding_bag_collection, EmbeddingBagCollection
    ):
        return None
    # Brings lagging rows of an adopted step up to date, or raises with a remedy.
    model.state_dict()
    skip_fx_notice()
    by_columns = DLRMByColumns(dlrm)
    look_ups = by_columns.look_ups
    paths = {_DENSE: "by_columns.dense_arch"}
    for name, place in zip(look_ups.features, look_ups.places, strict=True):
        paths[name] = f"by_columns.sparse_arch.tables.{place}"
    towers: dict[str, list[str]] = {}
    for tower, table in (("query", queries), ("candidate", catalogue)):
        towers[tower] = [
            path for name, path in paths.items() if name in table.column_names
        ]
    missing = [
        name
        for name in paths
        if name not in (*queries.column_names, *catalogue.column_names)
    ]
    if missing or not all(towers.values()):
        raise BundleError(
            f"model: {type(dlrm).__name__} reads {listed(paths)[:60]}; give each as a column of queries or of "
            f"catalogue.features, some in both; missing: {listed(missing)[:40] or 'one side'}"
        )
    return by_columns, towers
