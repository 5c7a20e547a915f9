"""The audit: pairs of a query and a candidate whose logits a bundle must reproduce, kept in it with what it makes of them.

LiveModel: a model that was trained, as towers with the candidate's last: what is exported, and what an audit compares
with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.session import NextItemModel, as_towers
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import InteractionLayer, Reordered
from torchrec_ext.modules.layers import Made, how_made
from torchrec_ext.modules.session_tower import SessionTower
from torchrec_ext.retrieval.bundle.architecture import describe_module, rebuild
from torchrec_ext.retrieval.bundle.encoder import RowEncoder
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.request_columns import Columns, Read
from torchrec_ext.retrieval.bundle.tables import read_table, write_table
from torchrec_ext.retrieval.index.exact import Metric
from torchrec_ext.retrieval.store.ids import IdMap
from torchrec_ext.retrieval.store.row_formats import greatest_loss
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.schema import BatchSchema

_ENCODER = "network."  # of a NextItemModel; NextItemTower calls it so too


class LiveModel:
    """A trained TowerModel or NextItemModel, sharded or not.

    Args:
        model: from ``hybrid_parallel``, any DistributedModelParallel, or unsharded.
        candidate: the tower of the candidates; the last where not given.
        also: classes of your own among its towers, or its interaction.

    Raises:
        BundleError: it is of another class, has no tower of the candidates alone, or holds what a bundle cannot name.
    """

    def __init__(self, model: nn.Module, *, candidate: str | None = None, also: Sequence[type[nn.Module]] = ()) -> None:
        unwrapped = get_unwrapped_module(model)
        if not isinstance(unwrapped, TowerModel | NextItemModel):
            raise BundleError(
                f"model: a {type(unwrapped).__name__} cannot be exported; give a TowerModel (two_tower, "
                "RetrievalModel, "
                "ContextualNCF, MultiTaskModel) or a NextItemModel, whose towers stand apart"
            )
        self.module: TowerModel | NextItemModel = unwrapped
        made = as_towers(unwrapped) if isinstance(unwrapped, NextItemModel) else unwrapped.made_of
        self._names = list(made)
        _check_sides(made)
        self.candidate = candidate or self._names[-1]
        if self.candidate not in made:
            raise BundleError(f"candidate={self.candidate!r}: is no tower of the model; they are {', '.join(made)}")
        self.names = [*(name for name in made if name != self.candidate), self.candidate]
        self.towers = {name: describe_module(made[name], also=also) for name in self.names}
        self._order = [self.names.index(name) for name in self._names]
        inner = unwrapped.interaction
        self.metric: Metric = (inner.metric if isinstance(inner, InteractionLayer) else None) or "top_nn"
        self.interaction = describe_module(how_made(inner), also=also)
        if self.names != self._names:
            widths = [int(rebuild(self.towers[name], also=also).out_features) for name in self.names]  # type: ignore[arg-type]
            self.interaction = describe_module(
                Made(Reordered, {"interaction": inner, "order": self._order, "widths": widths}), also=also
            )

    @property
    def reordered(self) -> bool:
        """Whether the bundle's interaction takes the towers in another order than the model's."""
        return self.names != self._names

    def schema(self) -> BatchSchema:
        """Of the batches that it takes."""
        return self.module.schema()

    @torch.no_grad()
    def logits(self, batch: TowerBatch) -> Tensor:
        """(B,) of the model as it was trained; where it is sharded, every rank calls it."""
        device = next((value.device for value in self.module.parameters()), torch.device("cpu"))
        batch = batch.to(device)
        if isinstance(self.module, TowerModel):
            return self.module.logits(batch).float().cpu()
        outputs = [self.module.embed(name, batch) for name in ("session", "item")]
        return self.module.interaction(outputs).float().cpu()  # type: ignore[no-any-return]

    def of_tower(self, name: str, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a tower out of those of the model, by their names in the tower."""
        if isinstance(self.module, NextItemModel):
            return (
                {}
                if name == self.candidate
                else {key: value for key, value in dense.items() if key.startswith(_ENCODER)}
            )
        prefix = f"towers.{name}."
        return {key.removeprefix(prefix): value for key, value in dense.items() if key.startswith(prefix)}

    def of_interaction(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Likewise of the interaction."""
        prefix = "interaction."
        inner = "interaction." if self.reordered else ""
        return {inner + key.removeprefix(prefix): value for key, value in dense.items() if key.startswith(prefix)}


def _check_sides(made: Mapping[str, Made]) -> None:
    for name, own in made.items():
        if issubclass(own.kind, SessionTower) and (own.arguments or {}).get("target"):
            raise BundleError(
                f"tower '{name}': the target item is one step of its sequence, so the item has no vector of its own "
                "that could be "
                "stored; rank candidates with the model itself, or train a NextItemModel or a SessionTower without a "
                "target"
            )
    if len(made) < 2:
        raise BundleError(
            f"model: has the tower {', '.join(made)} alone; serving needs one of the query and one of the candidates"
        )


PAIRS = 256
# Of a logit beside the greatest of the batch: float32 sums in another order, such as on other threads or another
# machine.
TOLERANCE = 1e-5
FOLDER = "audit"
_QUERIES, _CANDIDATES, _EXPECTED = (f"{FOLDER}/{name}.arrow" for name in ("queries", "candidates", "expected"))


@dataclass(frozen=True)
class Audit:
    """P pairs.

    Args:
        queries: P rows of raw columns of the query towers.
        candidates: P rows of raw columns of the candidate tower.
        positions: (P,) int64 where these candidates stand in the catalogue.
        ids: (P,) what they are called.
    """

    queries: pa.Table
    candidates: pa.Table
    positions: NDArray[np.int64]
    ids: NDArray[Any]

    @classmethod
    def choose(cls, queries: pa.Table, candidates: pa.Table, ids: IdMap, pairs: int = PAIRS) -> Audit:
        """Pairs evenly over both tables, the last row of each among them; the same wherever it is called."""
        rows = np.linspace(0, len(queries) - 1, pairs).round().astype(np.int64)
        places = np.linspace(0, len(candidates) - 1, pairs).round().astype(np.int64)
        mixed = places[np.random.default_rng(0).permutation(pairs)]
        return cls(queries.take(pa.array(rows)), candidates.take(pa.array(mixed)), mixed, ids.ids(mixed))

    def of_model(self, live: LiveModel, query: Columns, candidate: Columns) -> Tensor:
        """(P,) logits of the model as it was trained; where it is sharded, every rank calls it."""
        one, other = query.read(self.queries.to_pydict()), candidate.read(self.candidates.to_pydict())
        batch = live.schema().assemble(
            {**one.sparse, **other.sparse}, {**one.dense, **other.dense}, labels=torch.zeros(len(self.positions))
        )
        return live.logits(batch)

    def of_towers(self, query: RowEncoder, candidate: RowEncoder, interaction: nn.Module) -> tuple[Tensor, Tensor]:
        """(P,) logits of a bundle's towers, and (P, Dc) the candidates' vectors."""
        vectors = candidate.embed(self.candidates.to_pydict())
        return logits(query, query.read(self.queries.to_pydict()), vectors, interaction), vectors

    def write(self, folder: Path, expected: Tensor) -> None:
        """Writes the pairs with the logits that the bundle's own towers gave."""
        (folder / FOLDER).mkdir()
        write_table(folder / _QUERIES, self.queries)
        write_table(folder / _CANDIDATES, self.candidates)
        write_table(
            folder / _EXPECTED,
            pa.table({"id": pa.array(self.ids), "position": self.positions, "logit": expected.numpy()}),
        )

    @classmethod
    def open(cls, folder: Path) -> tuple[Audit, Tensor]:
        """The pairs and their expected logits."""
        queries, candidates, expected = (read_table(folder / name) for name in (_QUERIES, _CANDIDATES, _EXPECTED))
        if not len(queries) == len(candidates) == len(expected) or expected.column_names != ["id", "position", "logit"]:
            raise BundleError(f"{folder / FOLDER}: its files have different numbers of rows; export the bundle again")
        if not len(expected):
            raise BundleError(f"{folder / FOLDER}: has no pairs, so nothing is proven by it; export the bundle again")
        ids, positions, known = (expected[name].to_numpy() for name in ("id", "position", "logit"))
        return cls(queries, candidates, positions.copy(), ids), torch.from_numpy(known.astype(np.float32))


@torch.no_grad()
def logits(query: RowEncoder, read: Read, candidates: Tensor, interaction: nn.Module) -> Tensor:
    """(B,) logits of rows with a candidate's vector (B, Dc) each."""
    return interaction([*query.outputs(read), candidates]).float()  # type: ignore[no-any-return]


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The greatest difference; infinite where a number is not finite."""
    if not bool(torch.isfinite(found).all()) or not bool(torch.isfinite(expected).all()):
        return float("inf")
    return float((found - expected).abs().max())


def tolerance(expected: Tensor, share: float = TOLERANCE) -> float:
    """What logits of this size may differ by."""
    return share * max(1.0, float(expected.abs().max()))


def check_logits(where: str, found: Tensor, expected: Tensor, remedy: str) -> float:
    """The greatest difference.

    Raises:
        BundleError: it is beyond the tolerance.
    """
    apart, allowed = largest_difference(found, expected), tolerance(expected)
    if not apart <= allowed:
        raise BundleError(
            f"{where}: {len(expected)} logits differ by up to {apart:.3g}, at most {allowed:.3g} is rounding; {remedy}"
        )
    return apart


def check_store(where: Path, store: EmbeddingStore, audit: Audit, vectors: Tensor, lost: float) -> None:
    """Refuses a store that does not hold, under the ids of the audit's candidates, what is made of them.

    Args:
        where: the store, for the message.
        store: of the bundle.
        audit: its pairs.
        vectors: (P, width) that it should hold.
        lost: by how much it differed from them at the export, because of its type.

    Raises:
        BundleError: the store is of another tower, of another catalogue, or its ids are of other rows.
    """
    found = store.ids.positions(audit.ids)
    if not np.array_equal(found, audit.positions):
        at = int((found != audit.positions).argmax())
        raise BundleError(
            f"{where}: item {audit.ids[at]} is at position {found[at]}, in this catalogue at {audit.positions[at]}: "
            "the id "
            "map is of another catalogue; write the store with this catalogue, and export the bundle again"
        )
    lost, most = float(lost), greatest_loss(vectors, store.dtype)
    if not 0 <= lost <= 1.01 * most + tolerance(vectors):
        raise BundleError(
            f"{where}: its manifest says that {store.dtype} lost {lost:.3g} of a number, where rounding loses "
            f"{most:.3g} at most; "
            "export the bundle again"
        )
    apart, allowed = (
        largest_difference(store.rows(torch.from_numpy(audit.positions)), vectors),
        1.01 * lost + tolerance(vectors),
    )
    if not apart <= allowed:
        raise BundleError(
            f"{where}: the vectors of {len(audit.positions)} audited items differ by up to {apart:.3g} from what this "
            "bundle makes "
            f"of them (at most {allowed:.3g} is rounding): the store is of another tower or catalogue, or stale; embed "
            "the "
            "catalogue again, and export"
        )
