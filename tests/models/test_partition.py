"""Features into towers: planted groups are found, the load bound is kept, and the impossible is refused in numbers."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import EmbeddingBagConfig

from tests.contracts import run_ranks
from tests.examples import META, batches, small_model
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.partition import (
    Affinity,
    Partition,
    PartitionError,
    affinity,
    feature_bytes,
    id_vectors,
    partition,
    plane,
    pooled_vectors,
)
from torchrec_ext.schema import BatchSchema, Jagged

ROWS, DIM = 400, 12


def planted(features: int, groups: int, noise: float = 0.8, dims: tuple[int, ...] = (DIM,)) -> dict[str, Tensor]:
    """Feature i sees the hidden vector of group i % groups through noise and, where ``dims`` differ, its own basis."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(groups, ROWS, DIM, generator=generator)
    vectors = {}
    for i in range(features):
        seen = hidden[i % groups] + noise * torch.randn(ROWS, DIM, generator=generator)
        width = dims[i % len(dims)]
        vectors[f"f{i}"] = seen if dims == (DIM,) else seen @ torch.randn(DIM, width, generator=generator)
    return vectors


def groups_of(grouped: Partition) -> set[frozenset[str]]:
    return {frozenset(features) for features in grouped.groups.values()}


def strided(features: int, groups: int) -> set[frozenset[str]]:
    return {frozenset(f"f{i}" for i in range(first, features, groups)) for first in range(groups)}


@pytest.mark.unit
@pytest.mark.parametrize(("features", "groups"), [(6, 2), (12, 3), (26, 4), (60, 8)])
@pytest.mark.parametrize("measure", ["cosine", "cka"])
def test_planted_groups_are_found(features: int, groups: int, measure: str) -> None:
    grouped = partition(affinity(planted(features, groups), measure), towers=groups)  # type: ignore[arg-type]
    assert groups_of(grouped) == strided(features, groups)
    within, between = grouped.contrast()
    assert within > between + 0.25
    assert max(grouped.loads().values()) <= grouped.bound


@pytest.mark.unit
def test_cka_finds_them_through_tables_of_any_width_and_basis_where_a_cosine_cannot() -> None:
    vectors = planted(12, 3, dims=(8, 12, 16, 20))
    assert groups_of(partition(affinity(vectors, "cka"), towers=3)) == strided(12, 3)
    with pytest.raises(ValueError, match=r"'f0': 8, 'f1': 12.*differ.*measure='cka'"):
        affinity(vectors)


@pytest.mark.unit
def test_the_diverse_strategy_spreads_what_the_coherent_one_gathers() -> None:
    grouped = partition(affinity(planted(12, 4)), towers=3, strategy="diverse")
    within, between = grouped.contrast()
    assert within < between
    assert sorted(grouped.loads().values()) == [4, 4, 4]


@pytest.mark.unit
def test_affinities_have_their_closed_forms() -> None:
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    rotated = x @ torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))[0]
    halves = torch.stack([x[:, 0], x[:, 1]], dim=1), torch.stack([x[:, 0], -x[:, 1]], dim=1)
    cosine = affinity({"a": halves[0], "b": halves[1]}).values[0, 1]
    expected = ((x[:, 0] ** 2 - x[:, 1] ** 2) / (x[:, 0] ** 2 + x[:, 1] ** 2)).abs().mean()
    assert float(cosine) == pytest.approx(float(expected), abs=1e-6)
    same = affinity({"a": x, "b": 3 * rotated, "c": torch.randn(500, 6)}, "cka").values
    assert float(same[0, 1]) == pytest.approx(1, abs=1e-6)
    assert float(same[0, 2]) < 0.05


@pytest.mark.unit
def test_points_of_a_plane_keep_their_distances() -> None:
    points = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distances = torch.cdist(points, points)
    places, stress = plane(distances)
    assert stress < 1e-6
    torch.testing.assert_close(torch.cdist(places, places), distances, atol=1e-5, rtol=0)


@pytest.mark.unit
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=3, max_size=14), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_grouping_keeps_the_bound_and_gives_every_tower_something(
    loads: list[int], towers: int, random: object
) -> None:
    count = len(loads)
    points = torch.rand(count, 3, generator=torch.Generator().manual_seed(random.randint(0, 9)))  # type: ignore[attr-defined]
    near = Affinity(features=tuple(map(str, range(count))), values=torch.exp(-torch.cdist(points, points)).double())
    load = {str(i): float(value) for i, value in enumerate(loads)}
    grouped = partition(near, towers=towers, load=load)
    assert len(grouped.groups) == towers
    assert sorted(name for features in grouped.groups.values() for name in features) == sorted(load)
    assert max(grouped.loads().values()) <= grouped.bound * (1 + 1e-9)
    assert grouped.bound >= sum(loads) / towers


@pytest.mark.unit
def test_the_bound_outweighs_affinity() -> None:
    """Two groups of three, one of them heavy: under a bound of 20 a heavy feature goes to the light ones."""
    vectors = planted(6, 2)
    load = {name: 9.0 if int(name[1:]) % 2 else 1.0 for name in vectors}
    free = partition(affinity(vectors), towers=2, load=load, bound=27)
    assert groups_of(free) == strided(6, 2)
    bound = partition(affinity(vectors), towers=2, load=load, bound=20)
    assert max(bound.loads().values()) <= 20
    assert sorted(bound.loads().values()) == [11, 19] or sorted(bound.loads().values()) == [12, 18]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("bound", "why"),
    [
        (8, "bound=8: 'f1' alone has a load of 9; raise the bound to that at least"),
        (
            14,
            "bound=14: the features' loads add up to 30, more than 2 x 14 = 28; raise the bound to 18, or take 3 "
            "towers or more",
        ),
        (17, "bound=17: no packing of 6 loads into 2 towers was found that keeps it; the most even one has 18"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused_in_numbers(bound: float, why: str) -> None:
    vectors = planted(6, 2)
    load = {name: 9.0 if int(name[1:]) % 2 else 1.0 for name in vectors}
    with pytest.raises(PartitionError) as refused:
        partition(affinity(vectors), towers=2, load=load, bound=bound)
    assert why in str(refused.value)


@pytest.mark.unit
def test_features_that_read_one_table_stay_together() -> None:
    near = affinity(planted(6, 2))
    grouped = partition(near, towers=2, together=[("f0", "f1")], bound=4)
    (home,) = [features for features in grouped.groups.values() if "f0" in features]
    assert "f1" in home
    shared = EmbeddingBagConfig(name="both", feature_names=["f0", "f1"], num_embeddings=9, embedding_dim=4)
    tables = [
        shared,
        *(
            EmbeddingBagConfig(name=f"f{i}", feature_names=[f"f{i}"], num_embeddings=9, embedding_dim=4)
            for i in (2, 3, 4, 5)
        ),
    ]
    split = grouped.tables(tables)
    assert sorted(table.name for own in split.values() for table in own) == ["both", "f2", "f3", "f4", "f5"]
    with pytest.raises(PartitionError, match=r"table 'both': its features f0, f1 stand in the towers tower_0, tower_1"):
        partition(near, towers=2).tables(tables)


@pytest.mark.unit
def test_wrong_questions_are_refused() -> None:
    near = affinity(planted(4, 2))
    for arguments, why in (
        ({"towers": 5}, r"towers=5: must be 1 to 4"),
        ({"towers": 2, "load": {"f0": 1}}, r"no load for \['f1', 'f2', 'f3'\]"),
        ({"towers": 2, "load": {f"f{i}": math.nan for i in range(4)}}, "finite"),
        ({"towers": 2, "together": [("f0", "x")]}, r"together: \['x'\]"),
        ({"towers": 2, "strategy": "best"}, "strategy='best': must be one of coherent, diverse"),
    ):
        with pytest.raises(ValueError, match=why):
            partition(near, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2, 3\), must be \(2, 2\)"):
        Affinity(features=("a", "b"), values=torch.rand(2, 3))
    with pytest.raises(ValueError, match=r"1 features of \[5\] rows"):
        affinity({"a": torch.rand(5, 2)})


@pytest.mark.unit
def test_the_picture_and_the_table_say_what_was_found(tmp_path: Path) -> None:
    grouped = partition(affinity(planted(6, 2)), towers=2)
    assert str(grouped).splitlines()[:2] == ["tower_0: load 3: f0, f2, f4", "tower_1: load 3: f1, f3, f5"]
    grouped.draw(tmp_path / "plane.png")
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.unit
def test_ids_that_come_together_have_an_affinity_before_any_training() -> None:
    generator = torch.Generator().manual_seed(0)
    city = torch.randint(12, (ROWS,), generator=generator)
    columns = {"city": city, "zip": city * 7 % 12, "device": torch.randint(12, (ROWS,), generator=generator)}
    tables = [EmbeddingBagConfig(name=n, feature_names=[n], num_embeddings=12, embedding_dim=4) for n in columns]
    schema = BatchSchema.from_tables(tables)
    batch = schema.assemble({name: Jagged(ids) for name, ids in columns.items()}, {}, labels=torch.zeros(ROWS))
    near = affinity(id_vectors(batch, list(columns)), "cka").values
    assert float(near[0, 1]) > 0.8
    assert float(near[0, 2]) < 0.1


def vectors_of_a_rank(runtime: Runtime) -> dict[str, Tensor]:
    model = small_model(META)
    parallel, _ = hybrid_parallel(model, runtime)
    return pooled_vectors(parallel, batches(3, rank=runtime.rank, world_size=runtime.world_size))


def test_a_sharded_model_shows_the_vectors_of_the_unsharded_one() -> None:
    """The rows of both ranks, batch by batch, are those of one."""
    whole = small_model()
    initialise_tables(whole, seed=0)
    alone = pooled_vectors(whole, batches(3))
    ranks = run_ranks(vectors_of_a_rank, 2)
    assert alone.keys() == {"user_id", "history", "item_id"}
    for feature, expected in alone.items():
        halves = [rank[feature].view(3, 12, -1) for rank in ranks]
        torch.testing.assert_close(torch.cat(halves, dim=1).flatten(0, 1), expected)
    assert feature_bytes(small_model(META).towers.values()) == {
        "user_id": 101 * 16 * 4,
        "history": 50 * 16 * 4,
        "item_id": 50 * 16 * 4,
    }  # type: ignore[arg-type]
