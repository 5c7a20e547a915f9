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


def made(faiss: Any, kind: Kind, vectors: NDArray[np.float32]) -> tuple[Any, list[int]]:
    """The filled index, and its settings from the cheapest to the one that finds most."""
    count, width = vectors.shape
    lists = max(1, min(int(4 * count**0.5), count // 39))  # FAISS asks for 39 training points per list
    build: dict[str, Callable[[], Any]] = {
        "flat": lambda: faiss.IndexFlatIP(width),
        "hnsw": lambda: faiss.IndexHNSWFlat(width, _LINKS, faiss.METRIC_INNER_PRODUCT),
        "ivf": lambda: faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT),
        "pq": lambda: faiss.IndexIVFPQ(faiss.IndexFlatIP(width), width, lists, *_codes(count, width), faiss.METRIC_INNER_PRODUCT),
    }
    index = build[kind]()
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    if kind == "flat":
        return index, [0]
    if kind == "hnsw":
        return index, [2**power for power in range(4, 13)]
    steps = np.unique(np.geomspace(1, lists, num=64).round().astype(int))
    return index, [int(step) for step in steps]


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
