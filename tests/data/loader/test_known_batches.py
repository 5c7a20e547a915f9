"""Batches of every road have the values that they had before there was one assembler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.data.loader.test_loader import rows_of
from tests.data.loader.test_resident import loader_of as resident
from tests.data.loader.test_samplings import MIXED
from tests.data.loader.test_samplings import loader_of as drawn
from tests.data.loader.test_session_loader import loader_of as sessions
from tests.data.stream_sets import loader_of as streamed
from tests.data.stream_sets import parquet, schema_of
from torchrec_ext.batch import TowerBatch

pytestmark = pytest.mark.unit
USER = ("user_id", "history", "row")
KNOWN = {
    "drawn": "0dd2ebe1da44391a",
    "drawn shared": "5e6f0cfa44b96f1e",
    "mixed": "fa2368f95389b83b",
    "mixed shared": "151de3dbc3f0ba6f",
    "resident": "b66afce6a2abd8b0",
    "resident shared": "06dba3e439fcf9c8",
    "sessions": "db8c775530c3738a",
    "sessions whole": "162fe3d6766fc0e4",
    "streamed": "2ea9622da1e31b0d",
    "streamed plain": "52507fd8a45d5155",
    "streamed shared": "8a88ed5a9c09b2d4",
}


def digest(batches: Iterable[TowerBatch]) -> str:
    """Returns a digest of all but logarithms, of which another machine may have another last bit."""
    found = hashlib.sha256()
    for batch in batches:
        parts = [batch.dense, batch.labels, batch.weights, batch.total_weight]
        kept = [batch.sparse]
        if batch.shared is not None:
            kept.append(batch.shared.sparse)
            parts += [batch.shared.dense, batch.shared.index]
        for keyed in kept:
            found.update(",".join(keyed.keys()).encode())
            parts += [keyed.values(), keyed.lengths().int()]
        for part in parts:
            found.update(np.ascontiguousarray(part.numpy()).tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("road", KNOWN)
def test_batches_are_what_they_were(road: str, tmp_path: Path) -> None:
    kind, _, how = road.partition(" ")
    shared = USER if how == "shared" else ()
    if kind == "drawn":
        loader = drawn({}, shared, rank=1, world_size=2)
    elif kind == "mixed":
        loader = drawn(MIXED, shared, rank=1, world_size=2)
    elif kind == "resident":
        loader = resident(rows_of(43), shared, device="cpu")
    elif kind == "sessions":
        loader = sessions(40, negatives=0 if how == "whole" else 3)
    else:
        source = parquet(tmp_path, [20, 21, 3, 50], 2)
        loader = streamed(
            source,
            1,
            2,
            schema=schema_of(("user_id", "row") if shared else ()),
            shuffle=how != "plain",
            weight="weight",
            label="label",
        )
    assert digest(loader) == KNOWN[road]
