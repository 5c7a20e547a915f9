"""PlainTower: a tower's own output, without a KeyedJaggedTensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_configs import DataType

from tests.retrieval.bundles import bundle_of
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.encoder import PlainTower, is_plain
from torchrec_ext.schema import BatchSchema, Jagged

pytestmark = pytest.mark.unit


def table(name: str, *features: str, **options: Any) -> EmbeddingBagConfig:
    given = {"num_embeddings": 50, "embedding_dim": 8, **options}
    return EmbeddingBagConfig(
        name=name, feature_names=list(features or [name]), **given
    )


TOWERS: dict[str, Any] = {
    "sums and means": (
        [
            table("user"),
            table("item", "taken", "liked"),
            table("tag", pooling=PoolingType.MEAN),
        ],
        {},
    ),
    "half": ([table("user"), table("taken", data_type=DataType.FP16)], {}),
    "layers": (
        [table("user"), table("taken")],
        {"normalization": "layer", "residual": True, "dropout": 0.5},
    ),
    "batch normalisation": (
        [table("user"), table("taken")],
        {"normalization": "batch"},
    ),
    "compressed": (
        [table("user"), table("taken")],
        {"compress": Compression(flat=1, dim=4)},
    ),
    "no layers": ([table("user"), table("taken")], {"widths": ()}),
}


def columns(
    features: list[str], rows: int
) -> tuple[dict[str, Jagged], dict[str, torch.Tensor]]:
    """The user and each row one id; the rest lists, one of them empty."""
    draw = torch.Generator().manual_seed(rows)
    sparse = {}
    for name in features:
        if name == "user":
            sparse[name] = Jagged(torch.randint(50, (rows,), generator=draw))
        else:
            lengths = (
                torch.arange(rows, dtype=torch.int32)
                if rows > 1
                else torch.tensor([5], dtype=torch.int32)
            )
            sparse[name] = Jagged(
                torch.randint(50, (int(lengths.sum()),), generator=draw), lengths
            )
    return sparse, {"age": torch.rand(rows, generator=draw)}


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("rows", [1, 7])
def test_it_equals_the_tower(name: str, rows: int) -> None:
    tables, options = TOWERS[name]
    torch.manual_seed(0)
    tower = Tower(
        tables,
        options.get("widths", (16, 16, 4)),
        dense=["age"],
        **{k: v for k, v in options.items() if k != "widths"},
    )
    tower = tower.eval().requires_grad_(False)
    schema = BatchSchema.from_tables(tables, dense=["age"])
    sparse, dense = columns(schema.keys, rows)
    batch = schema.assemble(sparse, dense, labels=torch.zeros(rows))
    assert is_plain(tower)
    torch.testing.assert_close(
        PlainTower(tower)(sparse, dense),
        tower(batch.sparse, batch.dense),
        rtol=0,
        atol=1e-6,
    )


def test_an_empty_list_of_one_row_is_zeros() -> None:
    tower = Tower([table("taken")], ())
    empty = {
        "taken": Jagged(
            torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        )
    }
    assert PlainTower(tower)(empty, {}).tolist() == [[0.0] * 8]


def test_attention_weights_and_lent_tables_are_left_to_the_tower() -> None:
    attention = Tower(
        [
            EmbeddingConfig(
                name="t", feature_names=["t"], num_embeddings=5, embedding_dim=4
            )
        ],
        (4,),
    )
    weighted = Tower([table("taken")], (4,), weights={"taken": "ages"})
    shared = Tower([table("user"), table("taken")], (4,))
    shared.release_tables(["taken"])
    assert not any(map(is_plain, (attention, weighted, shared, torch.nn.Linear(2, 2))))


def test_a_bundle_embeds_as_its_towers_do(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "bundle")
    encoder = bundle._query
    assert bundle.users is not None
    read = encoder.read(bundle.users.rows(range(-1, len(bundle.users))))
    with torch.no_grad():
        expected = torch.cat(encoder.model.outputs(encoder.batch(read)), dim=1)
    torch.testing.assert_close(encoder.vectors(read), expected, rtol=0, atol=1e-6)
