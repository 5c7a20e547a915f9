"""The ids of `rec.embed`: those of its files, and those that --delete takes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchrec_ext.retrieval.store.ids import Ids


def is_path(deleted: str) -> bool:
    """Whether ``--delete`` names parquet files, and not ids; by its form, so that no file nearby changes what it says.

    Example:
        >>> is_path("gone.parquet"), is_path("gone/"), is_path("17,18")
        (True, True, False)
    """
    return deleted.endswith(".parquet") or "/" in deleted


def deleted_ids(given: str | None, key: str) -> Ids:
    """The ids that ``--delete`` says, by commas or in the column ``key`` of files.

    Raises:
        DataError: no file, none of parquet, or one that lacks the column.
    """
    if given is None:
        return []
    return ids_in([given], key) if is_path(given) else [one.strip() for one in given.split(",")]


def ids_in(paths: Sequence[str], key: str) -> NDArray[Any]:
    """(N,) int64 or str: the column ``key`` of files."""
    from torchx_apps.jobs.embedding import CatalogueFiles

    parts = [block.ids.to_numpy(zero_copy_only=False) for block in CatalogueFiles(paths, [], key)]
    return np.concatenate(parts or [np.zeros(0, np.int64)])


def of_kind(deleted: Ids, kind: str) -> NDArray[Any]:
    """Ids to delete as the others are.

    Raises:
        ValueError: text where the others are whole numbers.
    """
    if kind == "str":
        return np.asarray([str(one) for one in deleted], dtype=object)
    try:
        return np.asarray([int(one) for one in deleted], np.int64)
    except (ValueError, OverflowError):
        raise ValueError(
            f"--delete: the ids there are whole numbers, {', '.join(map(str, deleted[:5]))} are not all"
        ) from None
