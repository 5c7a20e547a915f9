"""Vectors of a file are written to the rows of their ids, for each format and sharding; all else is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import gather_state, run_ranks
from tests.examples import DIM, META, USERS, small_model
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchrec_ext.train.checkpoint.vectors import load_vectors

IDS = np.array([5, 0, USERS - 1, 40])
VECTORS = np.arange(4 * DIM, dtype=np.float32).reshape(4, DIM)
WEIGHT = "look_ups.collections.rows.embedding_bags.user_id.weight"


def write(folder: Path, ids: Any = IDS, vectors: Any = VECTORS) -> Path:
    path = folder / "vectors.parquet"
    pq.write_table(pa.table({"id": ids, "vector": list(vectors)}), path)
    return path


def loaded(runtime: Runtime, path: Path) -> Any:
    found = []
    for sharding in ("row_wise", "column_wise"):
        model = small_model(META)
        parallel, _ = hybrid_parallel(
            model, runtime, plan=PlanConfig(sharding=sharding)
        )
        before = gather_state(parallel)
        found.append(
            (load_vectors(parallel, "user_id", path), before, gather_state(parallel))
        )
    return found


def test_each_vector_stands_in_the_row_of_its_id_and_no_other_row_moves(
    tmp_path: Path,
) -> None:
    for count, before, after in run_ranks(loaded, 2, write(tmp_path))[0]:
        assert count == 4
        expected = before[WEIGHT].clone()
        expected[torch.from_numpy(IDS)] = torch.from_numpy(VECTORS)
        assert torch.equal(after[WEIGHT], expected)
        assert all(
            torch.equal(value, before[name])
            for name, value in after.items()
            if name != WEIGHT
        )


@pytest.mark.unit
def test_ids_are_those_of_the_rows_where_these_are_given(tmp_path: Path) -> None:
    model = small_model(torch.device("cpu"))
    before = model.state_dict()[WEIGHT].clone()
    values = pa.array([None, *(f"u{row}" for row in range(USERS - 1))])
    path = write(tmp_path, pa.array(["u7", "new", None, "u1"]))
    assert load_vectors(model, "user_id", path, values) == 2
    before[[8, 2]] = torch.from_numpy(VECTORS[[0, 3]])
    assert torch.equal(model.state_dict()[WEIGHT], before)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("ids", "vectors", "told"),
    [
        (
            np.array([3, USERS]),
            VECTORS[:2],
            f"id {USERS} is no row of table 'user_id', which has {USERS}",
        ),
        (
            np.array([3]),
            VECTORS[:1, :8].copy(),
            f"vectors are 8 wide, and table 'user_id' has embedding_dim={DIM}",
        ),
        (
            np.array([3]),
            np.full((1, DIM), np.nan, np.float32),
            "the vector of row 3 of the table is not finite",
        ),
        (
            np.array([3, 4]),
            [VECTORS[0, :8], np.tile(VECTORS[1], 2)[: 2 * DIM - 8]],
            "holds no vectors: ListType can only be casted to FixedSizeListType",
        ),
        (pa.array([3, None]), VECTORS[:2], "id -1 is no row"),
        (pa.array([3, 4]), [VECTORS[0], None], "holds no vectors: a vector is null"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(
    ids: Any, vectors: Any, told: str, tmp_path: Path
) -> None:
    path = write(tmp_path, ids, vectors)
    with pytest.raises(CheckpointError) as caught:
        load_vectors(small_model(torch.device("cpu")), "user_id", path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.unit
@pytest.mark.parametrize("content", [b"", b"x" * 300])
def test_a_file_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="holds no vectors"):
        load_vectors(small_model(torch.device("cpu")), "user_id", path)
