"""export(): writes a trained model, sharded or not, as a bundle, and proves that both give the same logits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import pyarrow as pa
import torch
from numpy.lib.format import open_memmap, write_array_header_1_0
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.preprocess.columns import CellError
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.data.preprocess.history import History
from torchrec_ext.data.preprocess.lists import Lists
from torchrec_ext.exports import CallableModule
from torchrec_ext.ids.look_ups import path_with_dynamic_ids
from torchrec_ext.models.session import NextItemModel
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.retrieval.bundle import (
    AUDIT,
    LOGIT,
    POSITION,
    PREPROCESSOR,
    ROWS,
    Bundle,
    Parity,
    Side,
)
from torchrec_ext.retrieval.catalogue import (
    Catalogue,
    NamedUsers,
    even_rows,
    raw_types,
    write_table,
)
from torchrec_ext.retrieval.columns import Columns, ModelColumn, sources_of
from torchrec_ext.retrieval.graphs import Graphs, require_onnx
from torchrec_ext.retrieval.leaves import Given, Network, OwnNetwork, TowerNetwork
from torchrec_ext.retrieval.manifest import (
    BundleError,
    Manifest,
    file_digests,
    write_manifest,
)
from torchrec_ext.retrieval.search import build_faiss, require_faiss
from torchrec_ext.retrieval.trace import Leaf
from torchrec_ext.retrieval.weights import Block, LiveWeights
from torchrec_ext.sealed import json_digest, package_versions, sync_tree

# So that torchrec_ext.retrieval.export is the function and this module.
sys.modules[__name__].__class__ = CallableModule

ExportProgress = Callable[[str, int, int], None]
SIDES = ("query", "candidate")
STORES = {"fp32": np.float32, "fp16": np.float16}
EXAMPLE_ROWS = 64  # raw rows that say what a preprocessor makes of them
AUDITED_QUERIES = 64
AUDITED_ITEMS = 4  # of each query
INDEX_QUERIES = 1024  # for an approximate index: half tune it, half measure it
# Of the greatest logit: float32 sums in another order, as another machine adds them.
TOLERANCE = 1e-4
# Of the greatest logit: what rounding rows, or an exchange between ranks, may change.
ROUNDED = 0.05
# Rows of the catalogue in a block: of a fixed size, because rows depend on it in the
# last bits.
_BLOCK_ROWS = 4096


class Renewal:
    """Keeps the graphs of a first export, so that later ones of the same layers only write new numbers into them."""

    def __init__(self) -> None:
        self.graphs: Graphs | None = None


def export(
    model: nn.Module,
    out: Path | str,
    *,
    catalogue: Catalogue,
    users: NamedUsers | None = None,
    queries: pa.Table | None = None,
    preprocessor: FittedPreprocessor | None = None,
    oov_ids: Mapping[str, int] | None = None,
    rows: Mapping[str, Tensor] | None = None,
    store: str = "fp32",
    index: str = "exact",
    recall: float = 0.95,
    details: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    renewal: Renewal | None = None,
    progress: ExportProgress | None = None,
) -> Manifest:
    """Writes a bundle: three graphs, tables, stored rows, preprocessing, and an audit against the model.

    If the model is sharded, call it on every rank with the same arguments. The digest depends only on weights, data and
    settings, not on ranks, plan or time. The folder appears when it is complete; until then an earlier one stays.

    Args:
        model: TowerModel or NextItemModel, from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded,
            whose last tower is the candidates'; or any module with a forward from columns by name to logits (B,); or
            TorchRec's DLRM or DLRMTrain, whose columns are ``dense_features``, and each sparse feature by its name.
        out: folder to make.
        catalogue: items to recommend from. What forward computes from these columns alone is stored for each item.
        users: users to look up by id, or None.
        queries: rows of raw columns of the queries for the audit; by default the users' rows.
        preprocessor: computes the model's columns from raw ones; without it, raw columns are the model's columns. Each
            column of a module of your own is computed from the queries' or from the catalogue's raw columns alone. Its
            shorter lists of ids are filled up at their end, as TorchRec's ``to_padded_dense(L)`` does, by the table's
            ``padding_idx`` or else row 0, to the ``length`` of History or ``max_length`` of Lists. Without these steps
            all lists of the queries or of the catalogue must have one length.
        oov_ids: out-of-vocabulary row of each feature, for requests, queries and the catalogue; by default 0. Of a
            module of your own, ids that no step of a preprocessor made have none, so that unknown ones are refused.
            Training must have moved that row.
        rows: rows of a table of TorchRec that the bundle holds, (n,) int64, by table; all rows by default. The
            bundle's ids are places among them: 0 for the first of these rows, and so on.
        store: numbers of the stored rows: ``fp32`` or ``fp16``.
        index: ``exact``, or the text of a FAISS ``index_factory``, for logits that are products.
        recall: required recall of an approximate index against exact search.
        details: JSON values for the certificate, such as the run and its figures.
        overwrite: replace an earlier bundle.
        renewal: keeps the graphs for the next export of this model, which only writes new numbers into them.
        progress: called on rank 0 with the name of the current part, the amount so far, and the total.

    Returns:
        The manifest, on every rank.

    Raises:
        BundleError: the model cannot be exported, data do not fit, or the bundle's logits differ from the model's.
        DataError: the folder exists already, or cannot be written.
    """
    require_onnx()
    if index != "exact":
        require_faiss()
    if store not in STORES:
        raise BundleError(f"store={store!r}: must be one of {', '.join(STORES)}")
    if not 0 < recall <= 1:
        raise BundleError(f"recall={recall}: must be greater than 0 and at most 1")
    path = path_with_dynamic_ids(model)
    if path is not None:
        raise BundleError(
            f"model: '{path}' has dynamic ids, which a bundle cannot count; export a copy whose nn.Embedding holds the "
            "live rows, see docs/ids.md"
        )
    queries = _queries(queries, users)
    # A column of both tables has the query's type.
    raw = raw_types(catalogue.features) | raw_types(queries)
    given = Given(
        types=raw if preprocessor is None else preprocessor.outputs,
        oov_ids=oov_ids or {},
        vocab=frozenset(() if preprocessor is None else preprocessor.vocab),
        longest={} if preprocessor is None else _longest(preprocessor),
        rows=rows or {},
    )
    unwrapped = get_unwrapped_module(model)
    renewal = renewal or Renewal()
    known = renewal.graphs.split if renewal.graphs is not None else None
    network: Network
    with evaluating(model):
        if isinstance(unwrapped, TowerModel | NextItemModel):
            network = TowerNetwork(unwrapped, given, known)
        else:
            asked = _model_rows(queries, preprocessor, "queries")
            items = _model_rows(catalogue.features, preprocessor, "item", catalogue.ids)
            network = OwnNetwork(model, asked, items, given, known)
        content = _Content(
            network=network,
            catalogue=catalogue,
            users=users,
            queries=queries,
            preprocessor=preprocessor,
            store=store,
            index=index,
            recall=recall,
            details=details or {},
            rounding=max([TOLERANCE, *map(_rounding, model.modules())]),
            renewal=renewal,
            progress=progress or (lambda *_: None),
        )
        # On every rank, because a sharded model's forward exchanges rows.
        expected = content.logits()
        # By the paths that the network has: a DLRMTrain's are those of its DLRM.
        weights = LiveWeights(network.model, given.rows)
        strange = sorted(given.rows.keys() - weights.tables.keys())
        if strange:
            raise BundleError(
                f"rows: '{strange[0]}' is no table of TorchRec in the model; export a copy whose nn.Embedding holds "
                "these rows alone, see docs/ids.md"
            )
        blocks = weights.blocks(sorted(network.tables & weights.tables.keys()))
        outcome: Any = None
        if weights.rank == 0:
            try:
                with (
                    whole_folder(Path(out), overwrite=overwrite, mark=AUDIT) as folder,
                    one_thread(),
                ):
                    outcome = content.write(folder, weights, blocks, expected)
                    # On the disk before the folder gets its name, so that a crash
                    # leaves no bundle of empty files.
                    sync_tree(folder)
            except Exception as error:
                # Raised below, when the other ranks have sent their rows.
                outcome = error
        # The other ranks send their rows even if rank 0 failed, so that no rank waits
        # for ever.
        for _ in blocks:
            pass
        # To all ranks, so that every rank raises rank 0's error, or returns its
        # manifest.
        outcome = weights.gathered(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _queries(queries: pa.Table | None, users: NamedUsers | None) -> pa.Table:
    rows = queries
    if rows is None and users is not None:
        rows = users.features
    if rows is None or not len(rows):
        raise BundleError(
            "queries: there are no rows to audit by; give users with their features, or queries of some raw rows"
        )
    return rows


def _model_rows(
    table: pa.Table,
    preprocessor: FittedPreprocessor | None,
    what: str,
    ids: NDArray[Any] | None = None,
) -> pa.Table:
    """Returns raw rows as the model's columns that these alone decide; with a preprocessor some rows."""
    if preprocessor is None:
        return table
    names = []
    for name in preprocessor.outputs:
        if sources_of(preprocessor, name) <= set(table.column_names):
            names.append(name)
    rows = even_rows(len(table), EXAMPLE_ROWS)
    (batch,) = table.take(pa.array(rows)).combine_chunks().to_batches()
    with _named(what, rows, ids):
        return pa.Table.from_batches([preprocessor.only(names).batch(batch)])


def _longest(preprocessor: FittedPreprocessor) -> dict[str, int]:
    """Returns the most entries of lists of ids by column, where a step limits them."""
    longest = {}
    for name, kind in preprocessor.outputs.items():
        limits = []
        for step in preprocessor.only([name]).steps:
            if isinstance(step, History):
                limits.append(step.length)
            elif isinstance(step, Lists) and step.max_length is not None:
                limits.append(step.max_length)
        if limits and kind == "list<int64>":
            longest[name] = min(limits)
    return longest


def _rounding(module: nn.Module) -> float:
    """Returns the largest relative change of a logit by half-precision sums or by quantized communication."""
    registry: Mapping[str, Any] = getattr(module, "qcomm_codecs_registry", None) or {}
    kinds = {codecs.forward.quantized_dtype for codecs in registry.values()} - {
        torch.float32
    }
    # A table in half precision rounds the sum of a bag, and a bundle does not.
    own = {parameter.dtype for parameter in module.parameters(recurse=False)}
    kinds |= own & {torch.float16, torch.bfloat16}
    roundings = [0.0]
    for kind in kinds:
        # Four times the rounding of one number; integers have a scale for each few
        # numbers.
        roundings.append(
            4 * torch.finfo(kind).eps if kind.is_floating_point else ROUNDED
        )
    return max(roundings)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode inside the block."""
    # Noted one by one: model.train() would put the others into training too.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread inside the block: a fixed order of sums gives bit-equal rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Content:
    """Model, data and settings of an export, equal on every rank; see :func:`export`."""

    network: Network
    catalogue: Catalogue
    users: NamedUsers | None
    queries: pa.Table
    preprocessor: FittedPreprocessor | None
    store: str
    index: str
    recall: float
    details: Mapping[str, Any]
    rounding: float
    renewal: Renewal
    progress: ExportProgress

    # The audit

    @property
    def audited(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(Q,) rows of the queries, and (Q, A) positions of the items that each is asked about."""
        rows = even_rows(len(self.queries), AUDITED_QUERIES)
        count = AUDITED_QUERIES * AUDITED_ITEMS
        positions = even_rows(len(self.catalogue.ids), count)
        # Shuffled, so that early queries do not always meet early items; a fixed seed,
        # so that every rank agrees.
        mixed = positions[np.random.default_rng(0).permutation(count)]
        return rows, mixed.reshape(AUDITED_QUERIES, AUDITED_ITEMS)

    def logits(self) -> Tensor:
        """Returns (Q, A) logits of the trained model."""
        rows, positions = self.audited
        queries = self.queries.take(pa.array(rows.repeat(AUDITED_ITEMS)))
        items = self.catalogue.features.take(pa.array(positions.ravel()))
        # A wrong value is named by its own row.
        with _named("queries", rows.repeat(AUDITED_ITEMS)):
            columns = self.sides["query"].read(queries).columns
        with _named("item", positions.ravel(), self.catalogue.ids):
            columns |= self.sides["candidate"].read(items).columns
        logits = self.network.logits(Chunk(columns))
        if not torch.isfinite(logits).all():
            raise BundleError(
                "model: gives NaN or infinity as a logit; train with finite values"
            )
        return logits.reshape(positions.shape)

    @cached_property
    def sides(self) -> dict[str, Columns]:
        """What reads each side's columns from raw ones."""
        return {
            side: Columns(columns, self.preprocessor)
            for side, columns in self.network.columns.items()
        }

    # Files

    def write(
        self,
        folder: Path,
        weights: LiveWeights,
        blocks: Iterator[Block],
        expected: Tensor,
    ) -> Manifest:
        """Writes every file of the bundle, audits it, and writes the manifest last."""
        dense = weights.dense()
        tables = self._write_tables(folder, weights, blocks, dense)
        split = self.network.split
        self._write_graphs(folder, dense)
        if self.index != "exact" and not split.product:
            raise BundleError(
                f"index={self.index!r}: FAISS searches products without weights, and these logits are others; take "
                "index='exact'"
            )
        if self.preprocessor is not None:
            self.preprocessor.save(folder / PREPROCESSOR)
        self.catalogue.write(folder)
        users = None
        if self.users is not None:
            self.users.write(folder, self.catalogue.ids)
            users = {"rows": len(self.users.ids), "key": self.users.key}
        content: dict[str, Any] = {
            "metric": "product" if split.product else "top_nn",
            "calibrated": self.network.calibrated,
            "graphs": {
                side: {
                    "leaves": [
                        {"input": leaf.input, **_as_json(leaf)}
                        for leaf in getattr(split, side).leaves
                    ],
                    "width": getattr(split, side).width,
                }
                for side in SIDES
            },
            "columns": {
                side: {name: _as_json(each) for name, each in sorted(columns.items())}
                for side, columns in self.network.columns.items()
            },
            "tables": tables,
            "store": self.store,
            "items": {"rows": len(self.catalogue.ids)},
            "users": users,
        }
        self._write_rows(folder, content)
        content["index"] = self._index(folder, content)
        parity = self._prove(folder, content, expected.numpy())
        files = file_digests(folder)
        content["files"] = files
        content["towers"] = {
            side: {
                "names": self.network.names[side],
                "digest": _digest(side, content, files),
            }
            for side in SIDES
        }
        certificate = {
            "parity": parity._asdict(),
            "versions": package_versions(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.details,
        }
        return write_manifest(folder, content, certificate)

    def _write_tables(
        self,
        folder: Path,
        weights: LiveWeights,
        blocks: Iterator[Block],
        dense: Mapping[str, Tensor],
    ) -> dict[str, str]:
        """Writes the tables, those of collections block by block; returns the file of each."""
        (folder / "tables").mkdir()
        files = {}
        for number, name in enumerate(sorted(self.network.tables)):
            # Numbered files: a table's name may hold characters that no file's name
            # can.
            files[name] = f"tables/{number:03}.npy"
        for name, pieces in groupby(blocks, key=itemgetter(0)):
            shape = weights.tables[name]
            half = shape.dtype == torch.float16
            header = {
                "descr": np.dtype(np.float16 if half else np.float32).str,
                "fortran_order": False,
                "shape": tuple(shape.size),
            }
            with (folder / files[name]).open("wb") as file:
                write_array_header_1_0(file, header)
                for _, start, values in pieces:
                    _check_table(name, start, values)
                    # Not tofile(), whose error on a full disk does not say so.
                    file.write((values if half else values.float()).numpy().data)
                    self.progress(
                        f"rows of table {name}", start + len(values), shape.size[0]
                    )
        # The others are plain embeddings of an own module.
        for name in self.network.tables - weights.tables.keys():
            weight = dense[name if name in dense else f"{name}.weight"]
            _check_table(name, 0, weight)
            np.save(folder / files[name], weight.float().numpy(), allow_pickle=False)
        return files

    def _write_graphs(self, folder: Path, dense: Mapping[str, Tensor]) -> None:
        graphs = self.renewal.graphs
        if graphs is None or graphs.split is not self.network.split:
            self.renewal.graphs = graphs = Graphs(self.network.split)
        graphs.renew(dense)
        graphs.write(folder)

    def _side(self, folder: Path, name: str, content: Mapping[str, Any]) -> Side:
        return Side(folder, name, content, self.preprocessor)

    def _write_rows(self, folder: Path, content: Mapping[str, Any]) -> None:
        """Runs ``candidate`` over the catalogue, block by block."""
        side = self._side(folder, "candidate", content)
        features = self.catalogue.features
        count = len(features)
        rows = open_memmap(
            folder / ROWS,
            mode="w+",
            dtype=STORES[self.store],
            shape=(count, side.width),
        )
        for start in range(0, count, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, count)
            with _named("item", np.arange(start, stop), self.catalogue.ids):
                rows[start:stop] = side.embed(features.slice(start, stop - start))
            bad = ~np.isfinite(rows[start:stop]).all(axis=1)
            if bad.any():
                item = self.catalogue.ids[start + int(bad.argmax())]
                raise BundleError(
                    f"item {item}: its row holds NaN or infinity in {self.store}; train with finite values"
                    f"{'' if self.store == 'fp32' else ', or take store=fp32'}"
                )
            self.progress("vectors", stop, count)
        rows.flush()

    def _prove(
        self, folder: Path, content: dict[str, Any], expected: NDArray[np.float32]
    ) -> Parity:
        """Compares the bundle with the trained model's logits (Q, A), and writes its own ones for whoever loads it.

        Both differ in their last digits, which depend on the ranks of the model; a bundle's digest must not.
        """
        rows, positions = self.audited
        queries = self.queries.take(pa.array(rows)).select(
            list(self.sides["query"].raw)
        )
        bundle = Bundle(folder, Manifest(content=content, certificate={}))
        found = bundle.answered(queries, positions)
        own = found[0]
        greatest = float(np.abs(expected).max())
        share = ROUNDED if self.store == "fp16" else self.rounding
        parity = Parity(
            own.size, float(np.abs(found - expected).max()), max(share * greatest, 1e-6)
        )
        if not parity.greatest_difference <= parity.allowed:
            raise BundleError(
                f"model: {own.size} logits of the bundle differ from the model's by up to "
                f"{parity.greatest_difference:.3g}, allowed is {parity.allowed:.3g}; compute each row's logit from its "
                "own columns, not from other rows' (or report it with the model)"
            )
        lists = (pa.list_(pa.int32()), pa.list_(pa.float32()))
        queries = queries.append_column(
            POSITION, pa.array(positions.tolist(), lists[0])
        )
        queries = queries.append_column(LOGIT, pa.array(own.tolist(), lists[1]))
        write_table(folder / AUDIT, queries)
        tolerance = max(TOLERANCE * float(np.abs(own).max()), 1e-6)
        content["audit"] = {"pairs": own.size, "tolerance": tolerance}
        return parity

    def _index(self, folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        if self.index == "exact":
            return {"kind": "exact"}
        side = self._side(folder, "query", content)
        # Each once: the queries that measure must not be among those that tune.
        rows = np.unique(even_rows(len(self.queries), INDEX_QUERIES))
        queries = side.embed(self.queries.take(pa.array(rows)))
        stored = np.load(folder / ROWS, mmap_mode="r")
        return build_faiss(folder, self.index, stored, queries, self.recall)


@contextmanager
def _named(
    what: str, places: NDArray[np.int64], ids: NDArray[Any] | None = None
) -> Iterator[None]:
    """Names a refused value of some rows by its place in the whole table, and by its id."""
    try:
        yield
    except CellError as error:
        place = int(places[error.row])
        if ids is not None:
            what = f"{what} {ids[place]}"
        raise CellError(error.column, place, error.rule, what) from None


def _check_table(name: str, start: int, rows: Tensor) -> None:
    # A sum is read once and keeps each NaN and infinity; finite ones may overflow in it.
    if rows.sum().isfinite():
        return
    wrong = ~torch.isfinite(rows).all(1)
    if bool(wrong.any()):
        row = start + int(wrong.int().argmax())
        raise BundleError(
            f"table '{name}': row {row} holds NaN or infinity; train with finite values"
        )


def _as_json(each: ModelColumn | Leaf) -> dict[str, Any]:
    return {key: value for key, value in vars(each).items() if value is not None}


def _digest(side: str, content: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """Returns the digest of all that computes a side's rows."""
    leaves = content["graphs"][side]["leaves"]
    tables = {leaf["table"] for leaf in leaves if leaf["table"]}
    paths = {content["tables"][table] for table in tables}
    paths |= {f"{side}.onnx"}
    paths |= {path for path in files if path.startswith(f"{PREPROCESSOR}/")}
    return json_digest(
        {
            "files": {path: files[path]["sha256"] for path in sorted(paths)},
            "graph": content["graphs"][side],
            "columns": content["columns"][side],
        }
    )
