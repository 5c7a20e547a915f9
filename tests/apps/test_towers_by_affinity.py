"""Features into towers: planted groups are found, the load bound is kept, and the impossible is refused in numbers."""

import importlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
example: Any = importlib.import_module("towers_by_affinity")
sys.path.pop(0)
Affinity = example.Affinity
affinity = example.affinity
id_vectors = example.id_vectors
partition = example.partition
plane = example.plane

ROWS, DIM = 400, 12


def planted(
    features: int, groups: int, noise: float = 0.8, dims: tuple[int, ...] = (DIM,)
) -> dict[str, Tensor]:
    """Feature i sees the hidden vector of group i % groups through noise and, where ``dims`` differ, its own basis."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(groups, ROWS, DIM, generator=generator)
    vectors = {}
    for i in range(features):
        seen = hidden[i % groups] + noise * torch.randn(ROWS, DIM, generator=generator)
        width = dims[i % len(dims)]
        vectors[f"f{i}"] = (
            seen
            if dims == (DIM,)
            else seen @ torch.randn(DIM, width, generator=generator)
        )
    return vectors


def groups_of(grouped: Any) -> set[frozenset[str]]:
    return {frozenset(features) for features in grouped.groups.values()}


def strided(features: int, groups: int) -> set[frozenset[str]]:
    return {
        frozenset(f"f{i}" for i in range(first, features, groups))
        for first in range(groups)
    }


@pytest.mark.parametrize(("features", "groups"), [(6, 2), (12, 3), (26, 4), (60, 8)])
def test_planted_groups_are_found(features: int, groups: int) -> None:
    grouped = partition(affinity(planted(features, groups)), towers=groups)
    assert groups_of(grouped) == strided(features, groups)
    within, between = grouped.contrast()
    assert within > between + 0.25
    assert max(grouped.loads().values()) <= grouped.bound


def test_they_are_found_through_tables_of_any_width_and_basis() -> None:
    assert groups_of(
        partition(affinity(planted(12, 3, dims=(8, 12, 16, 20))), towers=3)
    ) == strided(12, 3)


def test_affinities_have_their_closed_forms() -> None:
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    rotated = (
        x
        @ torch.linalg.qr(
            torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
        )[0]
    )
    same = affinity({"a": x, "b": 3 * rotated, "c": torch.randn(500, 6)}).values
    assert float(same[0, 1]) == pytest.approx(1, abs=1e-6)
    assert float(same[0, 2]) < 0.05


def test_points_of_a_plane_keep_their_distances() -> None:
    points = torch.randn(
        20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    distances = torch.cdist(points, points)
    places, stress = plane(distances)
    assert stress < 1e-6
    torch.testing.assert_close(
        torch.cdist(places, places), distances, atol=1e-5, rtol=0
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=3, max_size=14),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_grouping_keeps_the_bound_and_gives_every_tower_something(
    loads: list[int], towers: int, random: object
) -> None:
    count = len(loads)
    points = torch.rand(
        count, 3, generator=torch.Generator().manual_seed(random.randint(0, 9))
    )  # type: ignore[attr-defined]
    near = Affinity(
        columns=tuple(map(str, range(count))),
        values=torch.exp(-torch.cdist(points, points)).double(),
    )
    load = {str(i): float(value) for i, value in enumerate(loads)}
    grouped = partition(near, towers=towers, load=load)
    assert len(grouped.groups) == towers
    assert sorted(
        name for features in grouped.groups.values() for name in features
    ) == sorted(load)
    assert max(grouped.loads().values()) <= grouped.bound * (1 + 1e-9)
    assert grouped.bound >= sum(loads) / towers


def test_the_bound_outweighs_affinity() -> None:
    """Two groups of three, one of them heavy: under a bound of 20 a heavy feature goes to the light ones."""
    vectors = planted(6, 2)
    load = {name: 9.0 if int(name[1:]) % 2 else 1.0 for name in vectors}
    free = partition(affinity(vectors), towers=2, load=load, bound=27)
    assert groups_of(free) == strided(6, 2)
    bound = partition(affinity(vectors), towers=2, load=load, bound=20)
    assert max(bound.loads().values()) <= 20
    assert sorted(bound.loads().values()) == [11, 19] or sorted(
        bound.loads().values()
    ) == [12, 18]


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        (8, "bound=8: 'f1' alone has a load of 9; raise the bound to that at least"),
        (
            14,
            "bound=14: the columns' loads add up to 30, more than 2 x 14 = 28; raise the bound to 18, or take 3 "
            "towers or more",
        ),
        (
            17,
            "bound=17: no packing of 6 loads into 2 towers was found that keeps it; the most even one has 18",
        ),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused_in_numbers(
    bound: float, why: str
) -> None:
    vectors = planted(6, 2)
    load = {name: 9.0 if int(name[1:]) % 2 else 1.0 for name in vectors}
    with pytest.raises(example.PartitionError) as refused:
        partition(affinity(vectors), towers=2, load=load, bound=bound)
    assert why in str(refused.value)


def test_wrong_questions_are_refused() -> None:
    near = affinity(planted(4, 2))
    for arguments, why in (
        ({"towers": 5}, r"towers=5: must be 1 to 4"),
        ({"towers": 2, "load": {"f0": 1}}, r"no load for \['f1', 'f2', 'f3'\]"),
        ({"towers": 2, "load": {f"f{i}": math.nan for i in range(4)}}, "finite"),
    ):
        with pytest.raises(ValueError, match=why):
            partition(near, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2, 3\), must be \(2, 2\)"):
        Affinity(columns=("a", "b"), values=torch.rand(2, 3))
    with pytest.raises(ValueError, match=r"1 columns of \[5\] rows"):
        affinity({"a": torch.rand(5, 2)})


def test_the_picture_and_the_table_say_what_was_found(tmp_path: Path) -> None:
    grouped = partition(affinity(planted(6, 2)), towers=2)
    assert str(grouped).splitlines()[:2] == [
        "tower_0: load 3: f0, f2, f4",
        "tower_1: load 3: f1, f3, f5",
    ]
    grouped.draw(tmp_path / "plane.png")
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")


def test_ids_that_come_together_have_an_affinity_before_any_training() -> None:
    generator = torch.Generator().manual_seed(0)
    city = torch.randint(12, (ROWS,), generator=generator)
    ids = {
        "city": city,
        "zip": city * 7 % 12,
        "device": torch.randint(12, (ROWS,), generator=generator),
    }
    near = affinity(id_vectors(ids)).values
    assert float(near[0, 1]) > 0.8
    assert float(near[0, 2]) < 0.1


def answer(*arguments: str) -> tuple[str, str]:
    command = [sys.executable, str(ROOT / "examples/towers_by_affinity.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_log_becomes_towers_and_their_setting(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    city, device = draw.integers(0, 40, (2, 3000))
    columns = {
        "city": city,
        "zip": city * 7 % 40,
        "device": device,
        "browser": device // 2,
        "price": draw.random(3000),
    }
    columns["gap"] = pa.array([None, *([1] * 2999)])
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    log = str(tmp_path / "log.parquet")
    output, _ = answer(log, "--towers", "2", "--picture", str(tmp_path / "plane.png"))
    assert output.splitlines()[-1] == "--model.towers city+zip,device+browser"
    assert (tmp_path / "plane.png").exists()
    assert (
        answer(log, "--towers", "9")[1]
        == "towers=9: must be 1 to 4, the number of columns\n"
    )
    assert (
        "column 'price' is double, not whole numbers"
        in answer(log, "--towers", "2", "--columns", "price")[1]
    )
    assert (
        "column 'gap' has 1 gaps"
        in answer(log, "--towers", "2", "--columns", "gap", "city")[1]
    )
    assert (
        answer(log, "--towers", "2", "--bound", "nan")[1]
        == "bound=nan: must be 0 or more\n"
    )
    assert "header" in answer(log, "--towers", "2", "--trained", log)[1]
    assert "no-such.parquet" in answer("no-such.parquet", "--towers", "2")[1]
