"""A file of any content is read, or refused in words; none of it is run, and nothing hangs or takes the memory."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.train.checkpoint.test_files import HERE, filled, saved
from torchrec_ext.train.checkpoint import folder as manifest
from torchrec_ext.train.checkpoint.folder import (
    CheckpointRanks,
    read_checkpoint,
)
from torchrec_ext.train.checkpoint.load import load_checkpoint
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError, index_from_json
from torchrec_ext.train.checkpoint.vectors import read_vectors

pytestmark = pytest.mark.unit
EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.binary(max_size=9), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[int, bytes, int]]) -> bytes:
    """``data`` with some bytes put in place of others."""
    for place, new, old in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + old :]
    return data


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(saved(tmp_path_factory.mktemp("fuzz"), 1)[0])


def fuzzed(examples: int, *strategies: Any) -> Callable[[Any], Any]:
    chosen = settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    return lambda test: chosen(given(*strategies)(test))


@pytest.mark.parametrize("lost", ["step", "paths", "tensors", "files"])
def test_a_sealed_manifest_that_lacks_a_part(
    checkpoint: Path, tmp_path: Path, lost: str
) -> None:
    whole = read_checkpoint(str(checkpoint)).manifest
    for content in (
        {name: value for name, value in whole.items() if name != lost},
        {**whole, lost: "x"},
    ):
        (tmp_path / manifest.MANIFEST_NAME).write_bytes(manifest.sealed(content))
        with pytest.raises(
            CheckpointError,
            match=f"is not the manifest of a checkpoint: it lacks {lost}",
        ):
            read_checkpoint(str(tmp_path))


@pytest.mark.parametrize("examples", [30, pytest.param(3_000, marks=pytest.mark.slow)])
def test_tensors_with_other_bytes_in_them(
    checkpoint: Path, examples: int, tmp_path: Path
) -> None:
    # Behind the digests, which find every change: as of a file whose manifest was made
    # for it.
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    victim = next(tmp_path.glob("*.distcp"))
    whole = victim.read_bytes()
    together = CheckpointRanks(HERE)
    places = [
        place
        for place in read_checkpoint(str(tmp_path)).index.storage_data.values()
        if place.relative_path == victim.name
    ]
    assert places

    def survives(edits: list[tuple[int, bytes, int]], number: int) -> None:
        place = places[number % len(places)]
        part = whole[place.offset : place.offset + place.length]
        changed = edited(part, edits)[: len(part)].ljust(len(part), b"\0")
        victim.write_bytes(
            whole[: place.offset] + changed + whole[place.offset + place.length :]
        )
        with contextlib.suppress(CheckpointError):
            load_checkpoint(
                read_checkpoint(str(tmp_path)), model_state(filled(0)), together
            )

    fuzzed(examples, EDITS, st.integers(0, 99))(survives)()


@pytest.mark.unit
@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.sampled_from(["int64", "a", "x/y"]),
        lambda values: st.lists(values, max_size=5),
    )
)
def test_an_index_of_any_values(content: Any) -> None:
    good = [[0], [2], "a", 0, 8]
    chunks = [
        ["int64", [2], [content]],
        ["int64", content, [good]],
        [content, [2], [good]],
    ]
    chunks += [
        ["int64", [2], [[*good[:at], content, *good[at + 1 :]]]] for at in range(5)
    ]
    for tensor in (content, *chunks):
        with contextlib.suppress(CheckpointError):
            found = index_from_json({"t": tensor}, "i")
            for place in found.storage_data.values():
                assert "/" not in place.relative_path
                assert place.offset >= 0
                assert place.length >= 0


@pytest.mark.parametrize(
    "examples", [100, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_vectors_with_other_bytes_in_them(examples: int, tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"id": np.arange(8), "vector": list(values)}), path)
    whole = path.read_bytes()

    def survives(edits: list[tuple[int, bytes, int]]) -> None:
        path.write_bytes(edited(whole, edits))
        with contextlib.suppress(CheckpointError):
            for ids, block in read_vectors(path):
                assert ids.dtype == torch.int64
                assert block.dtype == torch.float32

    fuzzed(examples, EDITS)(survives)()
