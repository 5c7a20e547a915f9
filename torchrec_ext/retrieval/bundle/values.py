"""What stands in a bundle's files, looked at when it is loaded: a digest says who wrote a value, and not that it can be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrec_ext.modules.shared_tables import values_by_table
from torchrec_ext.retrieval.bundle.audit import Audit
from torchrec_ext.retrieval.bundle.encoder import RowEncoder
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.tables import UserTable
from torchrec_ext.retrieval.store.store import LIVE, SCALES, EmbeddingStore

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

_BLOCK = 2**20  # numbers looked at together: what is made of them stays in the cache
_ANEW = "export the bundle again"


def check_values(bundle: Bundle, stores: Mapping[Path, EmbeddingStore], users: Path) -> None:
    """Refuses a bundle that holds a value by which a request would fail, or be answered wrongly.

    Every array is read once, block by block, in place: about a tenth of what its digests cost.

    Args:
        bundle: whose parts belong together.
        stores: its stores by their folders.
        users: the folder of its users, where there are any.

    Raises:
        BundleError: naming the file, the place and the value.
    """
    for side in bundle.encoders:
        _check_weights(bundle.folder, side.model)
    _check_weights(bundle.folder, bundle.interaction)
    for where, store in stores.items():
        _check_store(where, store)
    if bundle.users is not None:
        context = Audit.open(bundle.folder)[0].queries.slice(0, 1).to_pydict()
        _check_users(users, bundle.users, bundle.encoders[0], len(bundle.store), context)


def _check_weights(folder: Path, module: nn.Module) -> None:
    tables = {id(weight): name for name, _, weight in values_by_table(module)}
    for name, weight in module.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and (row := _not_finite(weight)) is not None:
            what = f"table '{tables[id(weight)]}'" if id(weight) in tables else f"weight '{name}'"
            raise BundleError(
                f"{folder}: {what}, row {row}: holds NaN or infinity; export another checkpoint, or train with finite "
                "values"
            )


def _check_store(where: Path, store: EmbeddingStore) -> None:
    if store.live.view(np.uint8).max(initial=0) > 1 or not store.live.any():
        raise BundleError(
            f"{where}: {LIVE} says of none of its {len(store):,} items that it is live, or holds no yes or no; {_ANEW}"
        )
    if store.scales is not None and (row := _not_finite(store.scales)) is not None:
        raise BundleError(f"{where / store.version / SCALES}: row {row}: NaN or infinity; {_ANEW}")
    if store.dtype != "int8" and (row := _not_finite(store.matrix())) is not None:
        raise BundleError(
            f"{where}: the vector of item {store.ids.ids([row])[0]} (row {row}) holds NaN or infinity; {_ANEW}"
        )
    try:
        store.ids.check()
    except ValueError as error:
        raise BundleError(f"{where}: {error}; {_ANEW}") from None


def _not_finite(values: Tensor) -> int | None:
    """The first row with NaN or infinity; None where there is none. A NaN is the least and the greatest value at once."""
    rows = values.detach().reshape(len(values), -1) if values.dim() else values.detach().reshape(1, 1)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if block.numel() and not torch.isfinite(torch.stack(torch.aminmax(block))).all():
            return start + int((~torch.isfinite(block)).any(dim=1).int().argmax())
    return None


def _check_users(
    where: Path, users: UserTable, query: RowEncoder, items: int, context: Mapping[str, list[Any]]
) -> None:
    """Looks at ids, positions and features; ``context`` has what a request says beside the user, of one of the audit's."""
    try:
        users.ids.check()
    except ValueError as error:
        raise BundleError(f"{where}: {error}; {_ANEW}") from None
    for name, lists in users.positions():
        for first, chunk in _chunks(lists):
            values = chunk.flatten()
            found = pc.min_max(values).as_py()
            if values.null_count or (len(values) and not 0 <= found["min"] <= found["max"] < items):
                raise BundleError(
                    f"{where}: column '{name}', users {first} to {first + len(chunk) - 1}: positions {found['min']} to "
                    f"{found['max']} and {values.null_count} nulls; must be 0 to {items - 1}, of the {items:,} items; "
                    f"{_ANEW}"
                )
    for place in sorted(
        {place for name, column in users.features() for place in _odd(column) if name in query.request_columns}
    ):
        row = {**context, **users.rows([place if place < len(users) else -1])}
        try:
            query.read(row)
        except (ValueError, TypeError, OverflowError) as error:
            who = (
                f"user {users.ids.ids([place])[0]} (row {place})"
                if place < len(users)
                else "the user of whom nothing is known"
            )
            raise BundleError(
                f"{where}: {who}: {error}; a request for such a user would be refused: give users finite features and "
                f"{_ANEW}"
            ) from None


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Any]]:
    """The pieces of a column, each with the number of its first row."""
    first = 0
    for chunk in column.chunks:
        yield first, chunk
        first += len(chunk)


def _odd(column: pa.ChunkedArray) -> Iterator[int]:
    """The first rows of a column with a null, with NaN and with an infinity: each is read as every other of its kind."""
    found: set[str] = set()
    for first, chunk in _chunks(column):
        values = chunk.flatten() if _listed(chunk) else chunk
        for kind, mask in _kinds(values):
            place = int(pc.index(mask, True).as_py())
            if place >= 0 and kind not in found:
                found.add(kind)
                yield first + _row_of(chunk, place)


def _kinds(values: Any) -> Iterator[tuple[str, Any]]:
    """Which values are null, NaN or infinite, of those kinds that there may be."""
    if values.null_count:
        yield "null", values.is_null()
    if pa.types.is_floating(values.type) and len(values):
        numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)  # in which a null is NaN
        if not np.isfinite(numbers.min()) or not np.isfinite(numbers.max()):
            yield "nan", pc.is_nan(values)
            yield "inf", pc.is_inf(values)


def _row_of(chunk: Any, place: int) -> int:
    """The row of a value in a chunk, which may be one of lists."""
    return int(pc.list_parent_indices(chunk)[place].as_py()) if _listed(chunk) else place


def _listed(chunk: Any) -> bool:
    return hasattr(chunk.type, "value_type")
