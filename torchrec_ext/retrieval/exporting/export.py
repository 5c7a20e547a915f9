"""export(): a trained model, sharded or not, to a bundle that is proven equal to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.retrieval.bundle.audit import LiveModel
from torchrec_ext.retrieval.bundle.index import Kind
from torchrec_ext.retrieval.bundle.manifest import NAME, BundleError, Manifest
from torchrec_ext.retrieval.exporting.content import BundleContent, Catalogue, ExportConfig, NamedUsers, Progress
from torchrec_ext.retrieval.exporting.weights import ExportRanks, LiveWeights
from torchrec_ext.retrieval.store.quantized import Dtype
from torchrec_ext.sealed import sync_tree


def export(
    model: nn.Module,
    out: Path | str,
    *,
    catalogue: Catalogue,
    users: NamedUsers | None = None,
    queries: pa.Table | None = None,
    preprocessor: FittedPreprocessor | None = None,
    candidate: str | None = None,
    oov_ids: Mapping[str, int] | None = None,
    unseen: Mapping[str, Sequence[int]] | None = None,
    store: Dtype = "fp32",
    index: Kind = "exact",
    recall: float = 0.95,
    also: Sequence[type[nn.Module]] = (),
    details: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Writes a bundle: the towers apart, the top NN, preprocessing, stored vectors, index, and the proof that they are the model's.

    Where the model is sharded every rank calls it, with the same arguments. The digest depends on weights, data and
    settings alone: not on ranks, plan or time. The folder is there as a whole or not at all, and an earlier one stays
    as it was until then.

    Args:
        model: a TowerModel or a NextItemModel, from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded.
        out: the folder to make.
        catalogue: the items.
        users: what is known of users.
        queries: rows of raw columns of the query towers for the audit; those of the users where not given.
        preprocessor: makes the model's columns from raw ones; without, raw columns are the model's own.
        candidate: the tower of the candidates; the model's last where not given.
        oov_ids: by feature the row for what was never seen; 0 where not given.
        unseen: by feature, rows of its table that no training row has read: a request's id that is one of them takes
            the row for what was never seen. For features whose ids are their rows; a ``preprocessor`` leaves such ids
            out of its vocabulary.
        store: type of the stored vectors: ``fp32``, ``fp16`` or ``int8``.
        index: ``exact``, or one of FAISS's: ``flat``, ``ivf``, ``hnsw``, ``pq``, for a dot product or a cosine.
        recall: that an approximate index must reach, measured against exact search.
        also: classes of your own that the model holds, each ``Recorded``.
        details: JSON values for the certificate, such as the run and its figures.
        overwrite: replace an earlier bundle.
        progress: called on rank 0 with what is being written, how much of it is, and how much there is.

    Returns:
        The manifest, on every rank.

    Raises:
        BundleError: the model cannot be exported, a part of the data does not fit, or the bundle does not give the
            model's logits.
        DataError: the folder is taken, or cannot be written.
    """
    ranks = ExportRanks()
    live = LiveModel(model, candidate=candidate, also=also)
    parts = BundleContent(
        live=live,
        catalogue=catalogue,
        users=users,
        queries=_queries(queries, users),
        preprocessor=preprocessor,
        oov_ids=oov_ids or {},
        unseen=unseen or {},
        settings=ExportConfig(store=store, index=index, recall=recall),
        also=tuple(also),
        details=details or {},
        progress=progress or (lambda *_: None),
    )
    with evaluating(model):
        expected = parts.audit.of_model(live, parts.columns(live.names[:-1]), parts.columns([live.candidate]))
        weights = LiveWeights(model, ranks)
        dense = weights.dense()
        blocks = weights.blocks(parts.architecture.tables)
        outcome: Any = None
        if ranks.rank == 0:
            try:
                with whole_folder(Path(out), overwrite=overwrite, mark=NAME) as folder, one_thread():
                    outcome = parts.write(folder, weights.tables, blocks, dense, expected)
                    sync_tree(folder)
            except Exception as error:
                outcome = error
        for _ in blocks:  # the others send their rows, whatever becomes of them
            pass
        outcome = ranks.gathered(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _queries(queries: pa.Table | None, users: NamedUsers | None) -> pa.Table:
    rows = queries if queries is not None else None if users is None else users.features
    if rows is None or not len(rows):
        raise BundleError(
            "queries: there are no rows to audit by; give users with their features, or queries of some raw rows"
        )
    return rows


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation, and afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are in one order, whatever the number of threads of the job: the same vectors to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
