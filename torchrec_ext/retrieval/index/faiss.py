"""FaissIndex: FAISS's indexes with measured recall, and with filters inside the search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.index.exact import (
    FEW,
    ExactIndex,
    Metric,
    check_metric,
    check_request,
    join_results,
    pad_results,
)
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.versions import StoreError

FaissName = str  # a name in FAISS_KINDS
_LINKS = 32  # of a node of HNSW's graph


def faiss_module() -> Any:
    """Imports the package FAISS.

    Raises:
        ValueError: FAISS is not installed.
    """
    try:
        import faiss
    except ModuleNotFoundError:
        raise ValueError(
            "a FaissIndex needs the package faiss: pip install 'torchrec-ext[retrieval]'; ExactIndex does without"
        ) from None
    return faiss


class FaissKind:
    """Creates and searches FAISS's flat index: a query is compared with every vector.

    To add a value of ``index``, write a subclass and add it to :data:`FAISS_KINDS`.

    Attributes:
        name: name in manifests and commands.
        may_lift: whether a search by product may be faster over :func:`lifted` vectors.
        refined: candidates to score exactly for each requested result.
    """

    name = "flat"
    may_lift = False
    refined = 1

    def make(self, faiss: Any, count: int, width: int, metric: int) -> Any:
        """Returns an empty index for ``count`` vectors."""
        return faiss.IndexFlat(width, metric)

    def settings(self, count: int, k: int) -> list[int]:
        """Returns the settings for a search of ``k`` among ``count``, from the cheapest to the most thorough."""
        return [0]

    def parameters(
        self, faiss: Any, setting: int, k: int, options: Mapping[str, Any]
    ) -> Any:
        """Returns FAISS's parameters of a search for ``k`` at a setting, with its filter in ``options``."""
        return faiss.SearchParameters(**options)

    def cost(self, index: Any, setting: int, queries: NDArray[np.float32]) -> float:
        """Returns the relative cost of a search at a setting, for comparison within this kind."""
        return 0.0


class HnswKind(FaissKind):
    """A graph of neighbours. Its setting is ``efSearch``, the number of open nodes of a search."""

    name = "hnsw"
    may_lift = True

    def make(self, faiss: Any, count: int, width: int, metric: int) -> Any:
        """See :meth:`FaissKind.make`."""
        return faiss.IndexHNSWFlat(width, _LINKS, metric)

    def settings(self, count: int, k: int) -> list[int]:
        """See :meth:`FaissKind.settings`."""
        # From 16 to 4,096 in steps of sqrt(2), but at least k: HNSW finds no more than
        # the nodes it keeps open.
        return sorted(
            {max(min(k, count), int(2 ** (half / 2))) for half in range(8, 25)}
        )

    def parameters(
        self, faiss: Any, setting: int, k: int, options: Mapping[str, Any]
    ) -> Any:
        """See :meth:`FaissKind.parameters`."""
        return faiss.SearchParametersHNSW(efSearch=max(setting, k), **options)

    def cost(self, index: Any, setting: int, queries: NDArray[np.float32]) -> float:
        """Returns the setting as the cost."""
        return setting


class IvfKind(FaissKind):
    """Lists of vectors around centres. Its setting is ``nprobe``, the number of lists to read."""

    name = "ivf"
    may_lift = True

    def make(self, faiss: Any, count: int, width: int, metric: int) -> Any:
        """See :meth:`FaissKind.make`."""
        return faiss.IndexIVFFlat(
            faiss.IndexFlat(width, metric), width, _lists(count), metric
        )

    def settings(self, count: int, k: int) -> list[int]:
        """See :meth:`FaissKind.settings`."""
        return [
            int(step)
            for step in np.unique(
                np.geomspace(1, _lists(count), num=64).round().astype(int)
            )
        ]

    def parameters(
        self, faiss: Any, setting: int, k: int, options: Mapping[str, Any]
    ) -> Any:
        """See :meth:`FaissKind.parameters`."""
        return faiss.SearchParametersIVF(nprobe=setting, **options)

    def cost(self, index: Any, setting: int, queries: NDArray[np.float32]) -> float:
        """Returns the mean number of vectors compared with a query."""
        sizes = np.array(
            [index.invlists.list_size(number) for number in range(index.nlist)]
        )
        return float(
            sizes[index.quantizer.search(queries, setting)[1]].sum() / len(queries)
        )


class PqKind(IvfKind):
    """Lists of product-quantised vectors; the best candidates are scored exactly."""

    name = "pq"
    may_lift = False
    refined = 8

    def make(self, faiss: Any, count: int, width: int, metric: int) -> Any:
        """See :meth:`FaissKind.make`."""
        centres = faiss.IndexFlat(width, metric)
        # One code for two numbers, if that divides the width.
        codes = max(1, width // 2)
        while width % codes:
            codes -= 1
        # FAISS asks for 39 training points per centre, of which a code has 2^bits.
        bits = 8
        while bits > 2 and count < 39 * 2**bits:
            bits -= 2
        return faiss.IndexIVFPQ(centres, width, _lists(count), codes, bits, metric)


FAISS_KINDS: dict[str, FaissKind] = {
    each.name: each for each in (FaissKind(), IvfKind(), HnswKind(), PqKind())
}


def filled_index(
    faiss: Any,
    kind: FaissName,
    vectors: NDArray[np.float32],
    *,
    lift: bool = False,
    k: int = 1,
) -> tuple[Any, list[int]]:
    """Builds and fills an index; also returns its settings, from the cheapest to the most thorough.

    Args:
        faiss: the package.
        kind: name in :data:`FAISS_KINDS`.
        vectors: (I, D) vectors to index.
        lift: index :func:`lifted` vectors, by distance.
        k: neighbours per search; HNSW needs room for them.
    """
    rows = vectors
    metric = faiss.METRIC_INNER_PRODUCT
    if lift:
        squares = np.einsum("id,id->i", vectors, vectors)
        rows = lifted(vectors, norm=float(np.sqrt(squares.max())))
        metric = faiss.METRIC_L2
    count, width = rows.shape
    index = FAISS_KINDS[kind].make(faiss, count, width, metric)
    if not index.is_trained:
        index.train(rows)
    index.add(rows)
    return index, FAISS_KINDS[kind].settings(count, k)


def lifted(vectors: NDArray[np.float32], norm: float = 0.0) -> NDArray[np.float32]:
    """Adds a column (N, D + 1): vectors get equal norms by it, queries get zeros.

    The nearest vectors by distance are then those with the greatest products (Bachrach et al. 2014). Lists and graphs
    are designed for distances: by product, a vector of small norm is nobody's neighbour, so no path leads to it.

    Args:
        vectors: (N, D) vectors or queries.
        norm: greatest norm of the indexed vectors; 0 for queries.
    """
    out = np.zeros((len(vectors), vectors.shape[1] + 1), np.float32)
    out[:, :-1] = vectors
    if norm:
        squares = np.einsum("nd,nd->n", vectors, vectors)
        # Rounding may take the difference below 0.
        out[:, -1] = np.sqrt(np.maximum(norm**2 - squares, 0))
    return out


def _lists(count: int) -> int:
    """Returns the number of lists for ``count`` vectors; FAISS asks for 39 training points per list."""
    # FAISS's guidelines advise 4 to 16 times the square root of the number of vectors.
    return max(1, min(int(4 * count**0.5), count // 39))


def selector(allowed: Tensor | None, excluded: Tensor | None) -> list[Any]:
    """Returns FAISS's filter as the last object of a list, after the objects it refers to; keep all of them alive."""
    faiss = faiss_module()
    filters = []
    if allowed is not None:
        filters.append(
            faiss.IDSelectorBitmap(np.packbits(allowed.numpy(), bitorder="little"))
        )
    if excluded is not None:
        out = faiss.IDSelectorBatch(np.ascontiguousarray(excluded.numpy()))
        filters += [out, faiss.IDSelectorNot(out)]
    if len(filters) != 3:
        return filters
    return [*filters, faiss.IDSelectorAnd(filters[0], filters[2])]


_EPS = 1e-12  # as in torch.nn.functional.normalize
_FILE = "faiss.index"
_SETTING = "setting.json"
_QUERIES = 512
_AT_ONCE = 128  # queries in one search while choosing a setting
_TRIAL_ROWS = 50_000  # rows for the trial of both ways to index a product; with 20,000 their costs are too similar


class FaissIndex:
    """One of FAISS's indexes over a store, at the cheapest setting with the required recall (95 % confidence).

    For a product, ivf and hnsw index either the plain or the :func:`lifted` vectors, whichever are cheaper to search at
    that recall. Candidates are scored again from the stored rows: scores equal those of :class:`ExactIndex`, and a
    product-quantised index is refined. If a filter leaves fewer than K candidates although more items are allowed, the
    query is searched exactly.

    Attributes:
        measured_recall: share of the exact nearest K in its results, over queries not used to choose the setting.
        setting: ``nprobe`` of ivf and pq, ``efSearch`` of hnsw; 0 of flat.
        lifted: whether the vectors are indexed :func:`lifted`.
    """

    def __init__(
        self, index: Any, source: EmbeddingStore | Tensor, saved: Mapping[str, Any]
    ) -> None:
        self._index = index
        self._exact = ExactIndex(source, saved["metric"])
        self.metric: Metric = saved["metric"]
        self.kind: FaissName = saved["kind"]
        self.setting = int(saved["setting"])
        self.measured_recall = float(saved["recall"])
        self.k = int(saved["k"])
        self.size = self._exact.size
        self.lifted = bool(index.metric_type == faiss_module().METRIC_L2)

    @classmethod
    def build(
        cls,
        source: EmbeddingStore | Tensor,
        metric: Metric,
        *,
        kind: FaissName = "ivf",
        recall: float = 0.95,
        k: int = 100,
        queries: Tensor | None = None,
    ) -> FaissIndex:
        """Builds an index and chooses its cheapest setting with at least ``recall`` against exact search.

        Args:
            source: store, or vectors (I, D).
            metric: ``dot`` or ``cosine``, that of the model's loss.
            kind: ``flat``, ``ivf``, ``hnsw``, or ``pq``: product-quantised lists, an eighth of the memory.
            recall: recall to reach, above 0 and up to 1.
            k: number of neighbours for the recall.
            queries: (Q, D) outputs of the query tower, Q at least 2; rows of the store where not given. Half of them
                choose the setting, and the other half measure its recall.

        Raises:
            ValueError: no setting reaches the recall (the best is named), a wrong argument, or FAISS is missing.
        """
        faiss_module()
        check_metric(metric)
        if kind not in FAISS_KINDS or not 0 < recall <= 1 or not len(source):
            raise ValueError(
                f"kind={kind!r}, recall={recall}, {len(source)} vectors: kind is one of {', '.join(FAISS_KINDS)}, "
                "recall above 0 and up to 1, and there is at least one vector"
            )
        exact = ExactIndex(source, metric)
        vectors = torch.cat([exact.rows(start, stop) for start, stop in exact.blocks()])
        if queries is None:
            count = min(_QUERIES, max(2, len(vectors)))
            queries = vectors[torch.linspace(0, len(vectors) - 1, count).long()]
        lift = (
            metric == "dot"
            and FAISS_KINDS[kind].may_lift
            and cls._lift_pays(vectors, kind, recall, k, queries)
        )
        return cls._tuned(source, vectors, metric, kind, recall, k, queries, lift)

    @classmethod
    def _lift_pays(
        cls, vectors: Tensor, kind: FaissName, recall: float, k: int, queries: Tensor
    ) -> bool:
        """Measures on a sample whether :func:`lifted` vectors, depending on their norms, are cheaper at a recall."""
        sample = vectors[:: -(-len(vectors) // _TRIAL_ROWS)].contiguous()
        # As close in the sample as K neighbours are among all.
        sample_k = min(k, max(10, k * len(sample) // len(vectors)))
        costs = []
        for lift in (False, True):
            try:
                trial = cls._tuned(
                    sample, sample, "dot", kind, recall, sample_k, queries, lift
                )
            except ValueError:  # this way does not reach the recall
                costs.append((float("inf"), 0.0))
            else:
                query_rows = queries.numpy()
                if lift:
                    query_rows = lifted(query_rows)
                # At equal cost the greater recall decides.
                cost = FAISS_KINDS[kind].cost(trial._index, trial.setting, query_rows)
                costs.append((cost, -trial.measured_recall))
        return costs[1] < costs[0]

    @classmethod
    def _tuned(
        cls,
        source: EmbeddingStore | Tensor,
        vectors: Tensor,
        metric: Metric,
        kind: FaissName,
        recall: float,
        k: int,
        queries: Tensor,
        lift: bool,
    ) -> FaissIndex:
        index, settings = filled_index(
            faiss_module(), kind, vectors.numpy(), lift=lift, k=k
        )
        start = {
            "metric": metric,
            "kind": kind,
            "setting": settings[0],
            "recall": 0.0,
            "k": min(k, len(source)),
        }
        built = cls(index, source, start)
        built._tune(settings, recall, queries)
        return built

    def _tune(self, settings: Sequence[int], recall: float, queries: Tensor) -> None:
        """Bisects the settings with half of the queries, then confirms the choice with the other half."""
        if len(queries) < 2:
            raise ValueError(
                f"queries: {len(queries)}; needs 2 or more, one half to choose a setting and one to measure it"
            )
        halves = [torch.split(half, _AT_ONCE) for half in (queries[::2], queries[1::2])]
        truths = []
        for half in halves:
            truths.append(
                torch.cat([self._exact.search(block, self.k)[1] for block in half])
            )

        def recalls_at(index: int, half: int) -> Tensor:
            """Returns (Q,) recalls of a half's queries at a setting."""
            self.setting = settings[index]
            results = torch.cat(
                [self._search(block, self.k)[1] for block in halves[half]]
            )
            truth = truths[half]
            is_item = truth >= 0  # not the padding of a small catalogue
            hits = (truth[:, :, None] == results[:, None, :]).any(dim=2) & is_item
            return hits.sum(dim=1) / is_item.sum(dim=1).clamp(min=1)

        low = 0
        high = len(settings) - 1
        while low < high:
            middle = (low + high) // 2
            if float(recalls_at(middle, 0).mean()) >= recall:
                high = middle
            else:
                low = middle + 1
        recalls = recalls_at(low, 1)
        # The first half chose the setting, so its recall there is biased upwards. The
        # other half decides.
        while _recall_lower_bound(recalls) < recall and low + 1 < len(settings):
            low += 1
            recalls = recalls_at(low, 1)
        measured = float(recalls.mean())
        if measured < recall:
            raise ValueError(
                f"recall={recall}: {self.kind} reaches {measured:.4f} of the exact {self.k} at its widest setting, "
                f"{settings[low]}; ask for less, or take another kind (flat and exact find all)"
            )
        self.measured_recall = measured

    def search(
        self,
        queries: Tensor,
        k: int,
        *,
        allowed: Tensor | None = None,
        excluded: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`torchrec_ext.retrieval.index.exact.Index`; each query is searched with its own filter."""
        check_request(queries, k, self.size, allowed, excluded)
        candidate_mask = self._exact.candidate_mask(allowed)
        # A graph or a few lists hold too few of a rare value's items, and scoring all
        # of these takes less time.
        if (
            candidate_mask is not None
            and np.count_nonzero(candidate_mask) <= self.size * FEW
        ):
            return self._exact.search(queries, k, allowed=allowed, excluded=excluded)
        if candidate_mask is None and excluded is None:
            scores, positions = self._search(queries, k)
            # Results are sorted, so a short one ends with -1.
            short = positions.numpy()[:, -1] < 0
            if short.any():
                scores[short], positions[short] = self._exact.search(queries[short], k)
            return scores, positions
        results = []
        # One by one, because FAISS takes one filter for all queries of a search.
        for row, query in enumerate(queries[:, None]):
            excluded_positions = None
            excluded_sets = None
            if excluded is not None:
                excluded_positions = excluded[row]
                excluded_sets = [excluded_positions]
            result = self._search(
                query, k, selector(candidate_mask, excluded_positions)
            )
            if int(result[1][0, -1]) < 0:
                result = self._exact.search(
                    query, k, allowed=allowed, excluded=excluded_sets
                )
            results.append(result)
        return join_results(results)

    def _search(
        self, queries: Tensor, k: int, filters: Sequence[Any] = ()
    ) -> tuple[Tensor, Tensor]:
        """Returns the best K candidates of the index, scored by their stored rows; see :func:`selector`."""
        query_rows = self._exact.prepared(queries).numpy()
        kind = FAISS_KINDS[self.kind]
        candidate_count = min(self.size, k * kind.refined)
        options = {}
        if filters:
            options["sel"] = filters[-1]
        parameters = kind.parameters(
            faiss_module(), self.setting, candidate_count, options
        )
        index_queries = query_rows
        if self.lifted:
            index_queries = lifted(query_rows)
        _, candidates = self._index.search(
            index_queries, candidate_count, params=parameters
        )
        # In ascending order, so that the stable sort below puts the smaller position
        # first among ties.
        candidates.sort(axis=1)
        if not isinstance(self._exact.source, Tensor):
            self._exact.source.check()
        # FAISS pads with -1; row 0 stands in there, and its score is left out below.
        rows = self._exact.stored(np.maximum(candidates, 0).reshape(-1)).reshape(
            *candidates.shape, -1
        )
        scores: NDArray[np.float32] = np.matmul(rows, query_rows[:, :, None])[:, :, 0]
        if self.metric == "cosine":
            scores /= np.maximum(np.sqrt(np.einsum("qcd,qcd->qc", rows, rows)), _EPS)
        scores[candidates < 0] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        # From a query's columns to places in the flat arrays.
        order += np.arange(0, candidates.size, candidates.shape[1])[:, None]
        return pad_results(
            torch.from_numpy(scores.take(order)),
            torch.from_numpy(candidates.take(order)),
            k,
        )

    def save(self, folder: Path) -> None:
        """Creates ``folder`` and writes the index and its setting to it."""
        folder.mkdir(parents=True, exist_ok=True)
        faiss_module().write_index(self._index, str(folder / _FILE))
        saved = {
            "metric": self.metric,
            "kind": self.kind,
            "setting": self.setting,
            "recall": self.measured_recall,
            "k": self.k,
        }
        (folder / _SETTING).write_text(json.dumps(saved, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, source: EmbeddingStore | Tensor) -> FaissIndex:
        """Opens an index written by :meth:`save`, over the vectors it was built from.

        FAISS's native parser reads the file, and a digest only proves that the file is unchanged: load no index from
        an author you do not trust. The index is not rebuilt from the vectors, because every worker would do so at every
        start, and the recall would differ from the measured one.

        Raises:
            StoreError: the index is missing or damaged, or of another number or width of vectors.
            ValueError: the package is missing.
        """
        faiss = faiss_module()
        try:
            index = faiss.read_index(str(folder / _FILE))
            opened = cls(index, source, json.loads((folder / _SETTING).read_text()))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise StoreError(
                f"the index in '{folder}' cannot be read ({str(error)[:200]}); build it again"
            ) from None
        width = index.d - opened.lifted
        if index.ntotal != opened.size or width != opened._exact.width:
            raise StoreError(
                f"the index in '{folder}' is of {index.ntotal:,} vectors of {width}, these are {opened.size:,} of "
                f"{opened._exact.width}; build it again"
            )
        return opened


def _recall_lower_bound(recalls: Tensor) -> float:
    """Returns a 95 % lower confidence bound of the mean recall, from a sample (Q,)."""
    # 1.645 standard errors below the mean: the one-sided 95 % quantile of a normal
    # distribution.
    return float(
        recalls.mean() - 1.645 * recalls.std(correction=0) / len(recalls) ** 0.5
    )
