"""An 8-bit copy passes over rows and misses none: ties, filters, tombstones and odd numbers included."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from torchrec_ext.modules.interaction import DotProduct, GeneralizedMF, TopMLP
from torchrec_ext.retrieval.index import bounds
from torchrec_ext.retrieval.index.bounds import ScoreBounds
from torchrec_ext.retrieval.index.exact import ExactIndex, ScoredIndex
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.store.store import refresh_store
from torchrec_ext.retrieval.store.writer import write_store

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True, params=[*bounds._KERNELS])
def _also_of_few_rows(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 64 rows, of any number of them, by each kernel, whether it pays here or not."""

    def takes_kernel(self: ScoreBounds, *_: object) -> bool:
        self._kernel = request.param
        return True

    monkeypatch.setattr(bounds, "_WORTH_FLOATS", 1)
    monkeypatch.setattr(bounds, "_ROWS", 64)
    monkeypatch.setattr(ScoreBounds, "pays", takes_kernel)


def both(rows: Tensor, metric: str) -> tuple[ExactIndex, ExactIndex]:
    plain, quantized = ExactIndex(rows, metric), ExactIndex(rows, metric)
    assert quantized.quantize()
    return plain, quantized


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    queries=st.integers(1, 5),
    k=st.integers(1, 9),
    values=st.integers(1, 40),
    filters=st.integers(0, 3),
)
def test_finds_what_all_scores_say_to_the_last_tie(
    seed: int, queries: int, k: int, values: int, filters: int
) -> None:
    """Of small whole numbers, whose products are exact: scores are equal, and so are the positions."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-values, values + 1, (1_000, 6), generator=generator).float()
    asked = torch.randint(
        -values, values + 1, (queries, 6), generator=generator
    ).float()
    allowed = torch.rand(1_000, generator=generator) < 0.7 if filters & 1 else None
    excluded = (
        [torch.randperm(1_000, generator=generator)[:50] for _ in range(queries)]
        if filters & 2
        else None
    )
    plain, quantized = both(rows, "dot")
    expected, found = (
        index.search(asked, k, allowed=allowed, excluded=excluded)
        for index in (plain, quantized)
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


KINDS = ["normal", "heavy", "scales", "offset", "sparse"]


@pytest.mark.parametrize(
    ("metric", "rows_of"),
    [
        ("dot", "tiny"),
        ("dot", "huge"),
        *((m, k) for m in ("dot", "cosine") for k in KINDS),
    ],
)
def test_the_greatest_are_among_the_candidates(metric: str, rows_of: str) -> None:
    """By products in 64 bits; and they are few, where the numbers can be told apart at all."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(3_000, 16, generator=generator)
    rows = {
        "normal": normal,
        "heavy": normal**3,
        "scales": normal * 10 ** (8 * torch.rand(3_000, 1, generator=generator) - 4),
        "tiny": normal * 1e-33,
        "huge": normal * 1e36,
        "offset": 100 + normal,
        "sparse": normal * (torch.rand(3_000, 16, generator=generator) < 0.05),
    }[rows_of]
    queries = torch.cat(
        [torch.randn(7, 16, generator=generator), torch.ones(1, 16), torch.eye(16)[:1]]
    )
    exact, asked = (
        normalize(each.double()) if metric == "cosine" else each.double()
        for each in (rows, queries)
    )
    scores = asked @ exact.T
    index = both(rows, metric)[1]
    assert index._bounds is not None
    computed: list[int] = []

    def gathered(positions: NDArray[np.int64]) -> NDArray[np.float32]:
        computed.extend(positions.tolist())
        return index._gathered(positions)

    for query, row in zip(index.prepared(queries), scores, strict=True):
        computed.clear()
        (result,) = index._bounds.greatest(query[None].numpy(), 10, gathered)
        assert len(computed) == len(set(computed)) <= 3_000 // bounds._SHARE + 200
        if result is not None:
            assert set(row.topk(10).indices.tolist()) <= set(computed)
        assert result is not None or rows_of not in ("normal", "heavy")
    expected = torch.stack([row.topk(10).values for row in scores]).float()
    assert torch.allclose(index.search(queries, 10)[0], expected, rtol=1e-4, atol=1e-30)


def test_bounds_of_codes_hold_every_score() -> None:
    """Each score lies between what two bounds say, in units of the query's scale."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(500, 64, generator=generator) * 10 ** torch.randn(
        500, 1, generator=generator
    )
    made = ScoreBounds.of_rows(rows.split(123), (500, 64))
    made.pays(list, lambda _: rows.numpy())
    for query in torch.randn(20, 64, generator=generator):
        coded = bounds._Query(query.numpy(), 10, made._greatest, made._slack, 500)
        scale = float(query.double().abs().max()) / 127
        codes = torch.from_numpy(coded.codes[None].astype(np.int8))
        memory = torch.empty(1, 500, dtype=torch.int32)
        products = made._kernel(codes, made.codes, memory)[0].double()
        near = products * made._scales * scale
        reach = (
            torch.from_numpy(
                coded.of_errors * made._errors + coded.of_norms * made._norms
            )
            * scale
        )
        distance = (near - rows.double() @ query.double()).abs()
        assert bool((distance <= reach).all())
        assert float((reach / rows.norm(dim=1)).max()) < 0.05 * float(query.norm())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_over_a_store_without_its_tombstones(dtype: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((2_000, 8)).astype(np.float32)
    write_store(tmp_path, [(np.arange(2_000), rows)], dtype=dtype)
    store = refresh_store(tmp_path, [], [], deleted=[17, 18])
    query = torch.from_numpy(rows[17:18])
    for kind in (DotProduct([8, 8]), GeneralizedMF([8, 8])):
        plain, quantized = (ScoredIndex(projection(kind, 8), store) for _ in range(2))
        assert quantized.quantize()
        expected, found = (
            index.search(query, 10, excluded=[torch.tensor([3, 5])])
            for index in (plain, quantized)
        )
        assert torch.equal(found[1], expected[1])
        assert torch.allclose(found[0], expected[0], atol=1e-5)


def test_where_all_are_alike_all_are_computed() -> None:
    plain, quantized = both(torch.ones(1_000, 4), "cosine")
    assert quantized.search(torch.ones(2, 4), 3)[1].tolist() == [[0, 1, 2]] * 2
    nobody = torch.zeros(1_000, dtype=torch.bool)
    few = torch.zeros(1_000, dtype=torch.bool)
    few[[7, 11]] = True
    assert quantized.search(torch.ones(1, 4), 2, allowed=nobody)[1].tolist() == [
        [-1, -1]
    ]
    assert quantized.search(torch.ones(1, 4), 3, allowed=few)[1].tolist() == [
        [7, 11, -1]
    ]
    assert torch.equal(
        quantized.search(torch.zeros(1, 4), 3)[1], plain.search(torch.zeros(1, 4), 3)[1]
    )
    assert quantized.search(torch.ones(1, 4), 999)[1].shape == (1, 999)


def test_of_few_that_are_left_in_late_blocks_all_are_computed() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(1_000, 8, generator=generator)
    query = torch.randn(1, 8, generator=generator)
    plain, quantized = both(rows, "dot")
    assert quantized._bounds is not None
    for left in (
        [900],
        [70, 500, 990],
        list(range(300, 320)),
        list(range(0, 1_000, 40)),
    ):
        allowed = torch.zeros(1_000, dtype=torch.bool)
        allowed[left] = True
        computed: list[int] = []
        gathered = lambda places, computed=computed: (  # noqa: E731
            computed.extend(places) or rows.numpy()[places]
        )
        (told,) = quantized._bounds.greatest(
            query.numpy(), 5, gathered, allowed.numpy()
        )
        assert told is not None
        assert set(computed) <= set(left)
        assert torch.equal(
            quantized.search(query, 5, allowed=allowed)[1],
            plain.search(query, 5, allowed=allowed)[1],
        )


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("share", [0.0, 1e-9, 0.01, 0.2, 0.5, 1.0])
def test_a_filter_changes_no_score_and_loses_no_item(share: float, metric: str) -> None:
    """As all products row by row, to the last bit and tie; each row has a twin, and share 1e-9 is one item."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(4_003, 16, generator=generator)
    rows[2_000:] = rows[:2_003].clone()
    index = both(rows, metric)[1]
    stored = index._gathered(np.arange(4_003))
    for query in torch.randn(5, 1, 16, generator=generator):
        products = torch.from_numpy(
            np.einsum("nd,d->n", stored, index.prepared(query)[0].numpy())
        )
        allowed = torch.rand(4_003, generator=generator) < share
        if share:
            allowed[3_333] = True
        excluded = [torch.randperm(4_003, generator=generator)[:100]]
        allowed_here = allowed.clone()
        allowed_here[excluded[0]] = False
        for k in (
            10,
            100,
            5_000,
        ):
            # by the bounds; with too many left to compute; with a K too great for them
            for left, out in ((allowed, None), (allowed_here, excluded)):
                found, positions = index.search(query, k, allowed=allowed, excluded=out)
                best = products.masked_fill(~left, -torch.inf).sort(
                    descending=True, stable=True
                )
                count = min(k, int(left.sum()))
                assert torch.equal(positions[0, :count], best.indices[:count])
                assert torch.equal(found[0, :count], best.values[:count])
                assert bool((positions[0, count:] == -1).all())


@pytest.mark.parametrize("share", [None, 0.01, 0.5])
def test_a_batch_of_queries_finds_what_each_finds(share: float | None) -> None:
    """Beyond a number of queries, the products of all rows are computed."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randint(-9, 10, (2_000, 16), generator=generator).float()
    queries = torch.randint(-9, 10, (9, 16), generator=generator).float()
    allowed = None
    if share is not None:
        allowed = torch.rand(2_000, generator=generator) < share
    index = both(rows, "dot")[1]
    found = index.search(queries, 7, allowed=allowed)
    for row, query in enumerate(queries.split(1)):
        alone = index.search(query, 7, allowed=allowed)
        assert torch.equal(found[0][row : row + 1], alone[0])
        assert torch.equal(found[1][row : row + 1], alone[1])


def test_where_the_sample_says_nothing_of_the_others_all_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is drawn are the greatest, fewer than K of them."""
    monkeypatch.setattr(bounds, "_SAMPLE", 8)
    bounds._drawn.cache_clear()
    rows = torch.rand(4_000, 2, generator=torch.Generator().manual_seed(4))
    rows[:64] += 2
    rows[bounds._drawn(64)] += 2
    plain, quantized = both(rows, "dot")
    assert torch.equal(
        quantized.search(torch.ones(1, 2), 20)[1], plain.search(torch.ones(1, 2), 20)[1]
    )
    bounds._drawn.cache_clear()


def test_only_of_products_and_of_enough_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = projection(TopMLP([2, 4], (3,)), 4)
    network = ScoredIndex(made, made.candidates(torch.randn(1_000, 4)))
    assert not network.quantize()
    index = ExactIndex(torch.randn(1_000, 4), "dot")
    monkeypatch.setattr(bounds, "_WORTH_FLOATS", 4_001)
    assert not index.quantize()
    monkeypatch.setattr(bounds, "_WORTH_FLOATS", 4_000)
    assert index.quantize()
    assert index.quantized


def test_where_rows_are_nearly_alike_it_does_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    index = ExactIndex(1 + 1e-3 * torch.randn(20_000, 64), "dot")
    assert not index.quantize()
    assert not index.quantized


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_a_kernel_that_is_further_off_than_its_bound_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    """As one of another torch or processor may round."""
    monkeypatch.undo()
    known: dict[int, Tensor] = {}

    def remembered(queries: Tensor, rows: Tensor, out: Tensor) -> Tensor:
        """Takes no time, as no true kernel does."""
        if len(rows) not in known:
            exact = queries.double() @ rows.double().T
            known[len(rows)] = (exact * (1 + error * 2.0**-8)).float()
        return known[len(rows)]

    monkeypatch.setattr(bounds, "_KERNELS", {remembered: 2.0**-8})
    rows = torch.randn(200_000, 64)
    index = ExactIndex(rows, "dot")
    monkeypatch.setattr(
        ScoreBounds, "greatest", lambda _, queries, *rest: [()] * len(queries)
    )
    assert index.quantize() is (error < 1)
