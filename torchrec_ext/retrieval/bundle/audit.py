"""Audit: pairs of a query and a candidate, saved in a bundle with the logits it must reproduce.

LiveModel is the trained model as towers, the candidate's last. It is exported, and an audit compares with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.batch import Jagged, TowerBatch
from torchrec_ext.models.session import NextItemModel, as_towers
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import InteractionLayer, Reordered
from torchrec_ext.modules.layers import Made, how_made
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.session_tower import SessionTower
from torchrec_ext.retrieval.bundle.architecture import describe_module, rebuild
from torchrec_ext.retrieval.bundle.encoder import RowEncoder
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.request_columns import Columns, Read
from torchrec_ext.retrieval.bundle.tables import even_rows, read_table, write_table
from torchrec_ext.retrieval.bundle.traced import TracedModel
from torchrec_ext.retrieval.index.exact import Metric
from torchrec_ext.retrieval.store.ids import IdMap
from torchrec_ext.retrieval.store.row_formats import greatest_loss
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.validation import listed

_ENCODER = (
    "network."  # prefix of a NextItemModel's encoder weights, and of a NextItemTower's
)


class LiveModel:
    """A trained TowerModel or NextItemModel, sharded or not, or a user's module as a TracedModel.

    Args:
        model: result of ``hybrid_parallel``, any DistributedModelParallel, or an unsharded model.
        candidate: name of the candidate tower; by default the last.
        also: further allowed classes of its towers and its interaction.
        rows: rows of a table that the bundle holds, by table; all rows by default.

    Attributes:
        rounding: share of the greatest logit by which sharding may change a logit.

    Raises:
        BundleError: the model is of another class, has no tower for candidates alone, or contains an unknown class.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        candidate: str | None = None,
        also: Sequence[type[nn.Module]] = (),
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        unwrapped = get_unwrapped_module(model)
        if not isinstance(unwrapped, TowerModel | NextItemModel | TracedModel):
            raise BundleError(
                f"model: a {type(unwrapped).__name__} cannot be exported; give a TowerModel, a NextItemModel, an "
                "unsharded DLRM, or a module of your own by towers={'user': PATH, 'item': PATH}"
            )
        self.module: TowerModel | NextItemModel | TracedModel = unwrapped
        records = (
            as_towers(unwrapped)
            if isinstance(unwrapped, NextItemModel)
            else unwrapped.made_of
        )
        self._names = list(records)
        _check_towers(records)
        self.candidate = candidate or self._names[-1]
        if self.candidate not in records:
            raise BundleError(
                f"candidate={self.candidate!r}: is not a tower of the model; they are {listed(records)}"
            )
        # The candidate's tower comes last in a bundle.
        self.names = [name for name in records if name != self.candidate]
        self.names.append(self.candidate)
        self.rounding = max([TOLERANCE, *map(_rounding, model.modules())])
        self.rows = dict(rows or {})
        self.towers = {
            name: describe_module(records[name], also=also) for name in self.names
        }
        for description in self.towers.values():
            for table in description["arguments"].get("tables", ()):
                arguments = table["arguments"]
                # The bundle's table holds the exported rows alone.
                if arguments["name"] in self.rows:
                    arguments["num_embeddings"] = len(self.rows[arguments["name"]])
        self._order = [self.names.index(name) for name in self._names]
        inner = unwrapped.interaction
        self.metric: Metric = "top_nn"
        if isinstance(inner, InteractionLayer) and inner.metric is not None:
            self.metric = inner.metric
        self.interaction = describe_module(how_made(inner), also=also)
        # The candidate comes last in the bundle, and the interaction still takes the
        # towers in the model's order.
        if self.names != self._names:
            widths = []
            for name in self.names:
                tower: Any = rebuild(self.towers[name], also=also)
                widths.append(int(tower.out_features))
            self.interaction = describe_module(
                Made(
                    Reordered,
                    {"interaction": inner, "order": self._order, "widths": widths},
                ),
                also=also,
            )

    @property
    def reordered(self) -> bool:
        """Whether the bundle's interaction takes the towers in another order than the model's."""
        return self.names != self._names

    @property
    def calibrated(self) -> bool:
        """Whether the loss makes a logit the log-odds of a positive label."""
        if not isinstance(self.module, TowerModel) or not self.module.calibrated:
            return False
        return all(loss is bce for loss in self.module.head_losses())

    def schema(self) -> BatchSchema:
        """Returns the schema of the model's batches, without labels of further tasks: requests have none."""
        return dataclasses.replace(self.module.schema(), tasks=())

    def model_ids(self, sparse: Mapping[str, Jagged]) -> dict[str, Jagged]:
        """Returns ids of the bundle as rows of the model's tables."""
        ids = dict(sparse)
        for feature in self.module.schema().sparse:
            rows = self.rows.get(feature.tables[0])
            if rows is not None and feature.name in ids:
                ids[feature.name] = ids[feature.name]._replace(
                    values=rows[ids[feature.name].values]
                )
        return ids

    @torch.no_grad()
    def logits(self, batch: TowerBatch) -> Tensor:
        """Returns (B,) logits of the trained model. If it is sharded, call this on every rank."""
        device = next(
            (value.device for value in self.module.parameters()), torch.device("cpu")
        )
        batch = batch.to(device)
        if not isinstance(self.module, NextItemModel):
            return self.module.logits(batch).float().cpu()
        outputs = [self.module.embed(name, batch) for name in ("session", "item")]
        return self.module.interaction(outputs).float().cpu()  # type: ignore[no-any-return]

    def of_tower(self, name: str, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Selects a tower's weights from the model's, by their names in the tower."""
        if isinstance(self.module, NextItemModel):
            if name == self.candidate:
                return {}
            return {
                key: value for key, value in dense.items() if key.startswith(_ENCODER)
            }
        prefix = f"towers.{name}."
        return {
            key.removeprefix(prefix): value
            for key, value in dense.items()
            if key.startswith(prefix)
        }

    def of_interaction(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Selects the interaction's weights from the model's, by their names in the bundle's interaction."""
        prefix = "interaction."
        weights = {key: value for key, value in dense.items() if key.startswith(prefix)}
        # A Reordered holds the model's interaction under this very name.
        if self.reordered:
            return weights
        return {key.removeprefix(prefix): value for key, value in weights.items()}


def _rounding(module: nn.Module) -> float:
    """Returns the largest relative change of a logit by a collection's quantized communication."""
    registry: Mapping[str, Any] = getattr(module, "qcomm_codecs_registry", None) or {}
    kinds = {codecs.forward.quantized_dtype for codecs in registry.values()} - {
        torch.float32
    }
    roundings = [0.0]
    for kind in kinds:
        # Four times the rounding of one number; integers have a scale for each few
        # numbers.
        roundings.append(
            4 * torch.finfo(kind).eps if kind.is_floating_point else LOGIT_SHARE
        )
    return max(roundings)


def _check_towers(records: Mapping[str, Made]) -> None:
    for name, tower in records.items():
        if issubclass(tower.kind, SessionTower) and (tower.arguments or {}).get(
            "target"
        ):
            raise BundleError(
                f"tower '{name}': its target item is a step of its sequence, so the item has no vector of "
                "its own; make the model by bst(), or rank with the model itself"
            )
    if len(records) < 2:
        raise BundleError(
            f"model: has the tower {', '.join(records)} alone; serving needs one of the query and one of the candidates"
        )


PAIRS = 256
LOGIT_SHARE = 0.05  # of the greatest logit, by which int8 may change one: in a bundle's tables, or between ranks
TOLERANCE = 1e-5  # of a logit, relative to the greatest: float32 sums in another order, as another machine adds them
_FOLDER = "audit"
_QUERIES = f"{_FOLDER}/queries.arrow"
_CANDIDATES = f"{_FOLDER}/candidates.arrow"
_EXPECTED = f"{_FOLDER}/expected.arrow"


@dataclass(frozen=True)
class Audit:
    """P pairs of a query and a candidate, to compare a bundle with the trained model.

    Args:
        queries: P rows of raw columns of the query towers.
        candidates: P rows of raw columns of the candidate tower.
        positions: (P,) int64 positions of the candidates in the catalogue.
        ids: (P,) ids of the candidates.
    """

    queries: pa.Table
    candidates: pa.Table
    positions: NDArray[np.int64]
    ids: NDArray[Any]

    @classmethod
    def choose(
        cls, queries: pa.Table, candidates: pa.Table, ids: IdMap, pairs: int = PAIRS
    ) -> Audit:
        """Chooses pairs evenly over both tables, including the last row of each; equal on every rank."""
        rows = even_rows(len(queries), pairs)
        positions = even_rows(len(candidates), pairs)
        # Shuffled, so that early queries do not always meet early items; a fixed seed,
        # so that every rank agrees.
        mixed = positions[np.random.default_rng(0).permutation(pairs)]
        return cls(
            queries.take(pa.array(rows)),
            candidates.take(pa.array(mixed)),
            mixed,
            ids.ids(mixed),
        )

    def of_model(self, live: LiveModel, query: Columns, candidate: Columns) -> Tensor:
        """Returns (P,) logits of the trained model. If it is sharded, call this on every rank."""
        queries = query.read(self.queries.to_pydict())
        candidates = candidate.read(self.candidates.to_pydict())
        # The model computes from one batch, so the columns of both sides are joined row
        # by row.
        batch = live.schema().assemble(
            live.model_ids({**queries.sparse, **candidates.sparse}),
            {**queries.dense, **candidates.dense},
            labels=torch.zeros(len(self.positions)),
        )
        return live.logits(batch)

    def of_towers(
        self, query: RowEncoder, candidate: RowEncoder, interaction: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Returns (P,) logits of a bundle's towers, and the candidates' vectors (P, Dc)."""
        vectors = candidate.embed(self.candidates.to_pydict())
        return logits(
            query, query.read(self.queries.to_pydict()), vectors, interaction
        ), vectors

    def write(self, folder: Path, expected: Tensor) -> None:
        """Writes the pairs, with their logits from the bundle's own towers."""
        (folder / _FOLDER).mkdir()
        write_table(folder / _QUERIES, self.queries)
        write_table(folder / _CANDIDATES, self.candidates)
        write_table(
            folder / _EXPECTED,
            pa.table(
                {
                    "id": pa.array(self.ids),
                    "position": self.positions,
                    "logit": expected.numpy(),
                }
            ),
        )

    @classmethod
    def open(cls, folder: Path) -> tuple[Audit, Tensor]:
        """Reads the pairs of a bundle's folder and their (P,) expected logits."""
        queries, candidates, expected = (
            read_table(folder / name) for name in (_QUERIES, _CANDIDATES, _EXPECTED)
        )
        if not len(queries) == len(candidates) == len(
            expected
        ) or expected.column_names != ["id", "position", "logit"]:
            raise BundleError(
                f"{folder / _FOLDER}: its files have different numbers of rows; export the bundle again"
            )
        if not len(expected):
            raise BundleError(
                f"{folder / _FOLDER}: has no pairs, so nothing is proven by it; export the bundle again"
            )
        # A copy, because torch warns about read-only memory, such as Arrow's.
        positions = expected["position"].to_numpy().copy()
        audit = cls(queries, candidates, positions, expected["id"].to_numpy())
        return audit, torch.from_numpy(expected["logit"].to_numpy().astype(np.float32))


@torch.no_grad()
def logits(
    query: RowEncoder, rows: Read, candidates: Tensor, interaction: nn.Module
) -> Tensor:
    """Returns (B,) logits of B query rows, each with its candidate's vector in (B, Dc)."""
    return interaction([*query.outputs(rows), candidates]).float()  # type: ignore[no-any-return]


def largest_difference(values: Tensor, expected: Tensor) -> float:
    """Returns the greatest absolute difference; infinity if any number is not finite."""
    if not bool(torch.isfinite(values).all()) or not bool(
        torch.isfinite(expected).all()
    ):
        return float("inf")
    return float((values - expected).abs().max())


def tolerance(expected: Tensor, share: float = TOLERANCE) -> float:
    """Returns the allowed difference of logits: ``share`` of the greatest logit, or of 1."""
    return share * max(1.0, float(expected.abs().max()))


def check_logits(
    where: str, values: Tensor, expected: Tensor, remedy: str, share: float = TOLERANCE
) -> float:
    """Returns the greatest difference between actual and expected logits.

    Raises:
        BundleError: the difference is beyond the tolerance, ``share`` of the greatest.
    """
    difference = largest_difference(values, expected)
    allowed = tolerance(expected, share)
    if not difference <= allowed:  # unlike `>`, this also raises for NaN
        raise BundleError(
            f"{where}: {len(expected)} logits differ by up to {difference:.3g}, at most {allowed:.3g} is rounding; "
            f"{remedy}"
        )
    return difference


def check_store(
    where: Path, store: EmbeddingStore, audit: Audit, vectors: Tensor, rounding: float
) -> None:
    """Refuses a store unless it holds the audit's vectors under the candidates' ids.

    Args:
        where: path of the store, for the message.
        store: store of the bundle.
        audit: pairs of the bundle.
        vectors: (P, width) expected vectors.
        rounding: greatest difference between both at the export, due to the store's row format.

    Raises:
        BundleError: the store is of another tower, of another catalogue, or its ids are of other rows.
    """
    positions = store.ids.positions(audit.ids)
    if not np.array_equal(positions, audit.positions):
        pair = int((positions != audit.positions).argmax())
        raise BundleError(
            f"{where}: item {audit.ids[pair]} is at position {positions[pair]}, in this catalogue at "
            f"{audit.positions[pair]}: the id map is of another catalogue; export the bundle again"
        )
    rounding = float(rounding)
    most = greatest_loss(vectors, store.dtype)
    # `rounding` comes from the manifest: a forged, large value would let any store pass
    # the comparison below.
    if not 0 <= rounding <= 1.01 * most + tolerance(vectors):
        raise BundleError(
            f"{where}: its manifest says that {store.dtype} lost {rounding:.3g} of a number, where rounding loses "
            f"{most:.3g} at most; export the bundle again"
        )
    difference = largest_difference(
        store.rows(torch.from_numpy(audit.positions)), vectors
    )
    allowed = 1.01 * rounding + tolerance(vectors)
    if not difference <= allowed:
        raise BundleError(
            f"{where}: the vectors of {len(audit.positions)} audited items differ by {difference:.3g} "
            f"from this bundle's (at most {allowed:.3g}): a stale store, or another tower's; embed "
            "the catalogue again"
        )
