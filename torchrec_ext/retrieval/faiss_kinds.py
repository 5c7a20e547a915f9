"""FAISS's indexes as we build them, and its filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Kind = Literal["flat", "ivf", "hnsw", "pq"]
_LINKS = 32  # of a node of HNSW's graph


def faiss_module() -> Any:
    """FAISS.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import faiss
    except ModuleNotFoundError:
        raise ValueError(
            "a FaissIndex needs the package faiss: pip install 'torchrec-ext[retrieval]'; ExactIndex does without"
        ) from None
    return faiss


def made(faiss: Any, kind: Kind, vectors: NDArray[np.float32], *, lift: bool = False, k: int = 1) -> tuple[Any, list[int]]:
    """The filled index, and its settings from the cheapest to the one that finds most.

    Args:
        faiss: the package.
        kind: of the index.
        vectors: (I, D).
        lift: index the vectors :func:`lifted`, by distance.
        k: neighbours that will be asked for, which HNSW needs room for.
    """
    rows = lifted(vectors, norm=float(np.sqrt(np.einsum("id,id->i", vectors, vectors).max()))) if lift else vectors
    (count, width), metric = rows.shape, faiss.METRIC_L2 if lift else faiss.METRIC_INNER_PRODUCT
    lists = max(1, min(int(4 * count**0.5), count // 39))  # FAISS asks for 39 training points per list
    build: dict[str, Callable[[], Any]] = {
        "flat": lambda: faiss.IndexFlat(width, metric),
        "hnsw": lambda: faiss.IndexHNSWFlat(width, _LINKS, metric),
        "ivf": lambda: faiss.IndexIVFFlat(faiss.IndexFlat(width, metric), width, lists, metric),
        "pq": lambda: faiss.IndexIVFPQ(faiss.IndexFlat(width, metric), width, lists, *_codes(count, width), metric),
    }
    index = build[kind]()
    if not index.is_trained:
        index.train(rows)
    index.add(rows)
    if kind == "flat":
        return index, [0]
    if kind == "hnsw":
        return index, sorted({max(min(k, count), int(2 ** (half / 2))) for half in range(8, 25)})
    steps = np.unique(np.geomspace(1, lists, num=64).round().astype(int))
    return index, [int(step) for step in steps]


def lifted(vectors: NDArray[np.float32], norm: float = 0.0) -> NDArray[np.float32]:
    """(N, D + 1): vectors with a column that gives each the norm of the greatest; queries with a column of zeros.

    The nearest of them by distance are those of the greatest product (Bachrach et al. 2014), and lists and graphs are made for
    distances: by products, vectors of little norm are nobody's neighbours, and no path leads to them.

    Args:
        vectors: (N, D).
        norm: the greatest of the indexed vectors; 0 of queries.
    """
    out = np.zeros((len(vectors), vectors.shape[1] + 1), np.float32)
    out[:, :-1] = vectors
    if norm:
        out[:, -1] = np.sqrt(np.maximum(norm**2 - np.einsum("nd,nd->n", vectors, vectors), 0))
    return out


def cost(index: Any, kind: Kind, setting: int, queries: NDArray[np.float32]) -> float:
    """What a search costs beside one of the same kind with another setting: rows that ivf compares, nodes that hnsw keeps open."""
    if kind == "hnsw":
        return setting
    sizes = np.array([index.invlists.list_size(at) for at in range(index.nlist)])
    return float(sizes[index.quantizer.search(queries, setting)[1]].sum() / len(queries))


def _codes(count: int, width: int) -> tuple[int, int]:
    """Codes of a vector, one for two numbers where that divides the width, and bits of each: FAISS asks 39 rows a value."""
    parts = next(parts for parts in range(max(1, width // 2), 0, -1) if width % parts == 0)
    return parts, next((bits for bits in (8, 6, 4) if count >= 39 * 2**bits), 2)


def selector(allowed: Tensor | None, excluded: Tensor | None) -> list[Any]:
    """FAISS's filter, last, and what it refers to."""
    faiss, parts = faiss_module(), []
    if allowed is not None:
        parts.append(faiss.IDSelectorBitmap(np.packbits(allowed.numpy(), bitorder="little")))
    if excluded is not None:
        taken = faiss.IDSelectorBatch(np.ascontiguousarray(excluded.numpy()))
        parts += [taken, faiss.IDSelectorNot(taken)]
    return parts if len(parts) != 3 else [*parts, faiss.IDSelectorAnd(parts[0], parts[2])]
