"""The ids of `rec.embed`: those in its files, and those that --delete removes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchrec_ext.retrieval.store.ids import Ids


def is_path(deleted: str) -> bool:
    """Whether the text of ``--delete`` has the form of parquet paths rather than ids; no file need exist.

    Example:
        >>> is_path("gone.parquet"), is_path("gone/"), is_path("17,18")
        (True, True, False)
    """
    return deleted.endswith(".parquet") or "/" in deleted


def deleted_ids(text: str | None, key: str) -> Ids:
    """Returns the ids to delete: those in the text, separated by commas, or the column ``key`` of files that it names.

    Raises:
        DataError: there is no file, none is parquet, or one lacks the column.
    """
    if text is None:
        return []
    return ids_in([text], key) if is_path(text) else [item.strip() for item in text.split(",")]


def ids_in(paths: Sequence[str], key: str) -> NDArray[Any]:
    """Reads the column ``key`` of parquet files, (N,) int64 or str."""
    from torchx_apps.jobs.embedding_rows import CatalogueFiles

    blocks = [block.ids.to_numpy(zero_copy_only=False) for block in CatalogueFiles(paths, [], key)]
    return np.concatenate(blocks or [np.zeros(0, np.int64)])


def of_kind(deleted: Ids, kind: str) -> NDArray[Any]:
    """Converts ids to delete to the kind of a store's ids, ``int64`` or ``str``.

    Raises:
        ValueError: an id is text and the store's ids are whole numbers.
    """
    if kind == "str":
        return np.asarray([str(key) for key in deleted], dtype=object)
    try:
        return np.asarray([int(key) for key in deleted], np.int64)
    except (ValueError, OverflowError):
        examples = ", ".join(map(str, deleted[:5]))
        raise ValueError(f"--delete: ids must be whole numbers like those of the store; got {examples}") from None
