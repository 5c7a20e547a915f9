"""A module of a user's own is served as it was trained, whatever it is made of, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain

from tests.contracts import mostly_slow
from torchrec_ext.ids import Dynamic, DynamicEmbeddings
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue
from torchrec_ext.retrieval.export import Renewal, export
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.scorer import (
    EmbedRequest,
    RecommendRequest,
    RequestError,
    Scorer,
    ScoreRequest,
)

USERS, ITEMS, D, L, FIRST = 30, 50, 8, 4, 1_000


class Networks(nn.Module):
    """The first user's: two networks over numbers, and one on top."""

    def __init__(self, first: str = "profile") -> None:
        super().__init__()
        self.user, self.item = (
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, D))
            for width in (6, 3)
        )
        self.top = nn.Sequential(
            nn.ReLU(), nn.Linear(2 * D, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1)
        )
        self.first = first

    def forward(self, profile: Tensor, content: Tensor) -> Tensor:
        both = [self.user(profile), self.item(content)]
        return self.top(
            torch.cat(both if self.first == "profile" else both[::-1], 1)
        ).squeeze(1)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """The second user's: no network reads the item alone, so each pair runs all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(USERS, D), nn.Embedding(ITEMS, D)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, D), nn.Embedding(ITEMS, D)
        self.mlp = nn.Sequential(nn.Linear(2 * D + 6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(D + 4, 1)

    def forward(self, user: Tensor, item: Tensor, profile: Tensor) -> Tensor:
        deep = self.mlp(
            torch.cat([self.mlp_user(user), self.mlp_item(item), profile], 1)
        )
        return self.head(
            torch.cat([self.gmf_user(user) * self.gmf_item(item), deep], 1)
        )  # type: ignore[no-any-return]


class Sessions(nn.Module):
    """A GRU, a masked mean, a bag and batch normalisation over a padded history; its table is the items' too."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, D, padding_idx=0)
        self.bag = nn.EmbeddingBag(ITEMS, D, padding_idx=0)
        self.gru = nn.GRU(D, D, batch_first=True)
        self.layer = nn.Sequential(nn.Linear(2 * D, D), nn.BatchNorm1d(D))
        self.item = nn.Linear(D + 1, D)
        nn.init.normal_(self.layer[1].running_mean)  # type: ignore[arg-type]

    def forward(self, history: Tensor, item: Tensor, price: Tensor) -> Tensor:
        rows, mask = self.items(history), (history != 0).float()[:, :, None]
        mean = (rows * mask).sum(1) / mask.sum(1).clamp(min=1)
        query = self.layer(
            torch.cat([self.gru(rows)[1][0] + self.bag(history), mean], 1)
        )
        found = self.item(
            torch.cat([self.items(item), price.view(price.shape[0], 1)], 1)
        )
        return (
            F.normalize(query) @ F.normalize(found).T
            if self.training
            else self.score(query, found)
        )

    def score(self, query: Tensor, found: Tensor) -> Tensor:
        return (F.normalize(query) * F.normalize(found)).sum(1) / 0.05


class Biased(nn.Module):
    """Ids with offsets into one table, biases of both, a bounded score."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(USERS + ITEMS, D)
        self.bias = nn.Embedding(USERS + ITEMS, 1)
        self.register_buffer("offset", torch.tensor([0, USERS]))
        self.layer = nn.Linear(D, D)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        user, item = user + self.offset[0], item + self.offset[1]
        score = (self.layer(self.rows(user)) * self.rows(item)).sum(-1, keepdim=True)
        return torch.tanh(score + self.bias(user) + self.bias(item)) * 5


class Attentive(nn.Module):
    """Attention over a history with padding, layer norms, the latest item, and a bias of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
        self.norm = nn.LayerNorm(2 * D)
        self.bias = nn.Embedding(ITEMS, 1)
        self.top = nn.Sequential(nn.Linear(2 * D + D, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        rows = self.items(history)
        padding = history == 0
        # The first place always counts, so that no row is empty.
        padding = torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], 1)
        seen = self.attention(rows, rows, rows, key_padding_mask=padding)[0]
        seen = self.block(seen, src_key_padding_mask=padding)
        query = self.norm(torch.cat([seen.mean(1), self.items(history[:, -1])], 1))
        logit = self.top(torch.cat([query, self.items(item)], 1))
        return (logit + self.bias(item)).squeeze(-1)


class Targeted(nn.Module):
    """Attention over a padded history and the item, whose mask is infinite: BST (Chen et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, D)
        self.block = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
        self.top = nn.Linear(D, 1)

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([self.items(history), self.items(item)[:, None]], 1)
        padding = F.pad(history == 0, (0, 1))
        seen = self.block(rows, src_key_padding_mask=padding)
        return self.top(seen[:, -1]).squeeze(1)  # type: ignore[no-any-return]


class Parametrized(Networks):
    """Weights that are functions of others, of layers and of a table."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.item[0])  # type: ignore[index]
        spectral_norm(self.top[1])  # type: ignore[index]
        self.bias = weight_norm(nn.Embedding(USERS, 1))

    def forward(self, user: Tensor, profile: Tensor, content: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(profile, content) + self.bias(user)[:, 0]


class Bags(nn.Module):
    """Bags of every form that can be exported: sums and means, with a padding row or none."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(ITEMS, D, max_norm=2.0, padding_idx=0)
        self.sum = nn.EmbeddingBag(ITEMS, D, mode="sum")
        self.item = nn.Embedding(ITEMS, D)
        # As large as trained ones: the row of padding begins as zeros.
        nn.init.normal_(self.mean.weight)

    def forward(self, history: Tensor, recent: Tensor, item: Tensor) -> Tensor:
        query = self.sum(recent) + self.mean(history) * self.mean(history).sigmoid()
        return (self.item(item) * query).sum(1)


class Whole(nn.Module):
    """A softmax over the user's whole table, which no column looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, D)
        self.item = nn.Embedding(ITEMS, D)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        mean = self.item.weight.mean(0)
        return (self.user(user) * (self.item(item) - mean)).sum(1)


class Bent(Whole):
    """Nearly a product, as long as numbers are small."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        score = 100 * (self.user(user) * self.item(item)).sum(1)
        return score + 1e-6 * score * score * score


class Short(Bent):
    """Rows of a length that torch writes into those which a forward reads, and a column that it takes in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(900, D, max_norm=0.5)

    def forward(self, user: Tensor, item: Tensor, profile: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(user, item)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    query: list[str]
    item: list[str]
    product: bool = False
    oov: Mapping[str, int] = MappingProxyType({})


CASES = {
    "two networks": Case(Networks, ["profile"], ["content"]),
    "item first": Case(lambda: Networks("content"), ["profile"], ["content"]),
    "layers of pairs": Case(Mixed, ["user", "profile"], ["item"], oov={"user": 5}),
    "sessions": Case(Sessions, ["history"], ["item", "price"], product=True),
    "offsets": Case(Biased, ["user"], ["item"]),
    "attention": Case(Attentive, ["history"], ["item"]),
    "target in attention": Case(Targeted, ["history"], ["item"]),
    "parametrizations": Case(Parametrized, ["user", "profile"], ["content"]),
    "a whole table": Case(Whole, ["user"], ["item"], product=True),
    "nearly a product": Case(Bent, ["user"], ["item"]),
    "bags": Case(
        Bags, ["history", "recent"], ["item"], product=True, oov={"history": 0}
    ),
}
DRAW = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "user": np.arange(USERS),
    "profile": DRAW.normal(size=(USERS, 6)).astype(np.float32),
    "history": DRAW.integers(0, ITEMS, (USERS, L)),
    "item": np.arange(ITEMS)[::-1].copy(),
    "content": DRAW.normal(size=(ITEMS, 3)).astype(np.float32),
    "price": DRAW.random(ITEMS).astype(np.float32),
    "recent": DRAW.integers(0, ITEMS, (USERS, L)),
}


COLUMNS["history"][7, 2:] = 0


def table(names: list[str]) -> pa.Table:
    return pa.table(
        {
            name: COLUMNS[name].tolist() if COLUMNS[name].ndim > 1 else COLUMNS[name]
            for name in names
        }
    )


def made(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return case.model()


Bundles = Callable[[str], tuple[nn.Module, Bundle]]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """The model of a case and its bundle, which is exported once."""

    @functools.cache
    def exported(name: str) -> tuple[nn.Module, Bundle]:
        case, folder = CASES[name], tmp_path_factory.mktemp("own") / "bundle"
        model = made(case)
        catalogue = Catalogue(ids=np.arange(ITEMS) + FIRST, features=table(case.item))
        queries = table(case.query)
        export(model, folder, catalogue=catalogue, queries=queries, oov_ids=case.oov)
        assert model.training
        return model, Bundle.load(folder)

    return exported


@torch.no_grad()
def own(model: nn.Module, case: Case, user: int) -> Tensor:
    """Logits (I,) of a user with all items by the user's own forward."""
    columns = {
        name: torch.from_numpy(COLUMNS[name]) for name in (*case.query, *case.item)
    }
    columns |= {name: columns[name][[user] * ITEMS] for name in case.query}
    model.eval()
    return model(**columns)  # type: ignore[no-any-return]


def row(case: Case, user: int) -> dict[str, Any]:
    return {name: COLUMNS[name][user].tolist() for name in case.query}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        CASES,
        "parametrizations",
        "sessions",
        "bags",
        "target in attention",
        "nearly a product",
    ),
)
def test_what_is_served_is_what_was_trained(name: str, bundles: Bundles) -> None:
    case = CASES[name]
    model, bundle = bundles(name)
    assert (bundle.metric == "product") == case.product
    scorer, ids = Scorer(bundle), list(range(FIRST, FIRST + ITEMS))
    users = [0, 3, 7, 9, 12, 20, USERS - 1]
    together = bundle.query.embed([row(case, user) for user in users])
    for place, user in enumerate(users):
        expected = own(model, case, user).flatten()
        allowed = 1e-5 * max(1.0, float(expected.abs().max()))
        scores = torch.tensor(
            scorer.score(ScoreRequest(user=row(case, user), items=ids)).scores
        )
        torch.testing.assert_close(scores, expected, rtol=0, atol=allowed)
        logits = bundle.logits(together[place], np.arange(ITEMS))
        np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=allowed)
        best = scorer.recommend(RecommendRequest(user=row(case, user), k=5))
        assert best.items == [ids[index] for index in expected.topk(5).indices.tolist()]
        assert not best.unknown_features
    items = [
        {column: COLUMNS[column][index].tolist() for column in case.item}
        for index in (0, 3)
    ]
    again = scorer.embed(EmbedRequest(side="candidate", rows=items)).vectors
    np.testing.assert_allclose(again, bundle.rows[[0, 3]], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_dlrm_of_torchrec_is_served_as_it_was_trained(
    dtype: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {
        "user": (USERS, ["user"], PoolingType.SUM),
        "item": (ITEMS, ["item", "history"], PoolingType.MEAN),
    }
    tables = [
        EmbeddingBagConfig(
            name=name,
            feature_names=names,
            num_embeddings=rows,
            embedding_dim=D,
            pooling=pooling,
        )
        for name, (rows, names, pooling) in sizes.items()
    ]
    model, other = (
        DLRMTrain(DLRM_DCN(EmbeddingBagCollection(tables=tables), 6, [D], [8, 1], 2, 4))
        for _ in range(2)
    )
    numbers = (4 * COLUMNS["profile"]).astype(dtype)
    queries = table(["user", "history"]).append_column(
        "dense_features", [numbers.tolist()]
    )
    catalogue = Catalogue(
        ids=np.arange(ITEMS), features=pa.table({"item": np.arange(ITEMS)})
    )
    renewal = Renewal()
    both: Any = {"catalogue": catalogue, "queries": queries, "renewal": renewal}
    export(model, tmp_path / "bundle", **both)
    user = {
        "user": 7,
        "history": COLUMNS["history"][7].tolist(),
        "dense_features": numbers[7].tolist(),
    }
    scores = (
        Scorer(Bundle.load(tmp_path / "bundle"))
        .score(ScoreRequest(user=user, items=list(range(ITEMS))))
        .scores
    )
    ids = [
        torch.full((ITEMS,), 7),
        torch.arange(ITEMS),
        torch.from_numpy(COLUMNS["history"][7]).repeat(ITEMS),
    ]
    lengths = torch.tensor([1, 1, L], dtype=torch.int32).repeat_interleave(ITEMS)
    features = KeyedJaggedTensor(
        ["user", "item", "history"], torch.cat(ids), lengths=lengths
    )
    expected = model.model.eval()(
        torch.from_numpy(numbers).float()[[7] * ITEMS], features
    ).flatten()
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-6)
    # Another model's weights in the same graphs, which an export proves.
    graphs = renewal.graphs
    parity = export(other, tmp_path / "renewed", **both).parity
    assert renewal.graphs is graphs
    assert parity["greatest_difference"] <= parity["allowed"] < 1e-3


def test_the_items_half_of_the_first_layer_is_applied_before_a_row_is_stored(
    bundles: Bundles,
) -> None:
    model, bundle = bundles("two networks")
    assert bundle.rows.shape == (ITEMS, 6)
    with torch.no_grad():
        content = torch.from_numpy(COLUMNS["content"])
        half = F.linear(model.item(content).relu(), model.top[1].weight[:, D:])  # type: ignore[operator, union-attr, index]
    np.testing.assert_allclose(bundle.rows, half.numpy(), rtol=0, atol=1e-6)


def test_a_table_of_both_sides_is_kept_once(bundles: Bundles) -> None:
    _, bundle = bundles("sessions")
    assert list(bundle.manifest.content["tables"]) == ["bag", "items"]


@torch.no_grad()
def test_a_bag_leaves_its_padding_row_out(bundles: Bundles) -> None:
    """An unknown id reads its oov row, and lists have the length of training."""
    case = CASES["bags"]
    model, bundle = bundles("bags")
    scorer = Scorer(bundle)
    tables = bundle.manifest.content["tables"]
    assert sorted(tables) == ["item", "mean", "sum"]

    def served(history: list[int]) -> Any:
        user = row(case, 4) | {"history": history}
        return scorer.score(ScoreRequest(user=user, items=[FIRST, FIRST + 7]))

    for sent, padded, unknown in (
        ([0, 0, 0, 0], [0, 0, 0, 0], []),
        ([0, 9, 0, 3], [9, 3, 0, 0], []),
        ([9, -1, 3, 0], [0, 9, 0, 3], ["history"]),
        ([9, 3, ITEMS, 5], [9, 3, 5, 0], ["history"]),
    ):
        columns = {name: torch.from_numpy(COLUMNS[name])[[4, 4]] for name in case.query}
        columns["history"] = torch.tensor([padded] * 2)
        items = torch.from_numpy(COLUMNS["item"])[[0, 7]]
        expected = model.eval()(**columns, item=items).tolist()
        answer = served(sent)
        assert answer.scores == pytest.approx(expected, abs=1e-5)
        assert answer.unknown_features == unknown
    for wrong in ([], [1, 2, 3, 4, 5]):
        with pytest.raises(RequestError, match=rf"'history', row 0: .* one of {L};"):
            served(wrong)


@torch.no_grad()
def test_rows_that_no_audit_reads_are_as_short_as_max_norm(tmp_path: Path) -> None:
    """A request does not name the column that forward does not read."""
    model, ids = Short(), np.arange(900)
    catalogue = Catalogue(ids=ids, features=pa.table({"item": ids}))
    export(
        model, tmp_path / "b", catalogue=catalogue, queries=table(["user", "profile"])
    )
    asked = ScoreRequest(user={"user": 3}, items=ids.tolist())
    scores = Scorer(Bundle.load(tmp_path / "b")).score(asked).scores
    users = torch.full((900,), 3)
    expected = model.eval()(users, torch.from_numpy(ids), users)
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-3)


def test_ids_that_forward_computes_are_checked_too(bundles: Bundles) -> None:
    """A graph looks them up, which would take -1 for the last row."""
    _, bundle = bundles("offsets")
    scorer = Scorer(bundle)
    for user in (-1, USERS + ITEMS, -(2**62)):
        with pytest.raises(RequestError, match="the model cannot take these values"):
            scorer.score(ScoreRequest(user={"user": user}, items=[FIRST]))


class Described(nn.Module):
    """An item is its id and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, D)
        self.item = nn.Embedding(ITEMS, D)
        self.layer = nn.Linear(3, D)

    def forward(self, user: Tensor, item: Tensor, content: Tensor) -> Tensor:
        return (self.user(user) * (self.item(item) + self.layer(content).relu())).sum(1)


def described(folder: Path, features: pa.Table, **oov: int) -> tuple[Any, Scorer]:
    torch.manual_seed(0)
    model = Described()
    export(
        model,
        folder / "b",
        catalogue=Catalogue(ids=np.arange(len(features)) + FIRST, features=features),
        queries=table(["user"]),
        oov_ids=oov,
        overwrite=True,
    )
    return model.eval(), Scorer(Bundle.load(folder / "b"))


@torch.no_grad()
def test_unknown_ids_read_the_rows_that_are_named_or_are_refused(
    tmp_path: Path,
) -> None:
    """Of users, of items of the catalogue, and of items that it lacks, whose numbers are zeros."""
    known = table(["item", "content"])
    added = pa.table({"item": [ITEMS + 7], "content": [[0.5, 0.0, 0.0]]})
    more = pa.concat_tables([known, added.cast(known.schema)])
    with pytest.raises(
        ValueError, match=rf"column 'item': {ITEMS + 7} is no row of .*'item': ROW"
    ):
        described(tmp_path, more)
    assert not (tmp_path / "b").exists()
    model, scorer = described(tmp_path, more, user=5, item=2)
    user = {"user": USERS}
    answer = scorer.score(ScoreRequest(user=user, items=[FIRST + ITEMS, 7]))
    content = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    expected = model(torch.tensor([5, 5]), torch.tensor([2, 2]), content).tolist()
    assert answer.scores == pytest.approx(expected, abs=1e-5)
    assert (answer.unknown_features, answer.unknown_items) == (["user"], [7])
    _, strict = described(tmp_path, known)
    for asked, item, what in (
        (user, FIRST, rf"^user.user: .*{USERS} is no row of .* 0 to {USERS - 1}"),
        ({"user": 3}, 7, r"^items: .*oov_ids={'item': ROW}"),
    ):
        with pytest.raises(RequestError, match=what):
            strict.score(ScoreRequest(user=asked, items=[item]))


@pytest.mark.parametrize(
    ("oov", "named"),
    [
        ({"itme": -1}, "'itme': -1 must be a row of a table"),
        ({"content": 0}, "'content': 0 must be a row of a table that its values look"),
        (
            {"user": USERS},
            rf"'user': {USERS} must be .* user \({USERS}\)",
        ),
    ],
)
def test_a_row_of_unknown_ids_that_has_no_effect_is_refused(
    oov: dict[str, int], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=named):
        described(tmp_path, table(["item", "content"]), **oov)
    assert not (tmp_path / "b").exists()


def test_a_wrong_number_is_named_by_its_item(tmp_path: Path) -> None:
    content = COLUMNS["content"].copy()
    content[31, 1] = np.nan
    with pytest.raises(
        ValueError, match=f"item {FIRST + 31}, column 'content', row 31"
    ):
        described(
            tmp_path,
            pa.table({"item": COLUMNS["item"], "content": content.tolist()}),
        )


def test_a_row_of_a_table_that_is_no_number_is_named(tmp_path: Path) -> None:
    """No audited query reads it, but some user's request would."""
    model = Described()
    with torch.no_grad():
        model.user.weight[20, 3] = torch.nan
    features = table(["item", "content"])
    catalogue = Catalogue(ids=np.arange(ITEMS), features=features)
    queries = table(["user"]).slice(0, 10)
    with pytest.raises(BundleError, match=r"table 'user': row 20 holds NaN"):
        export(model, tmp_path / "b", catalogue=catalogue, queries=queries)


class Crossed(nn.Module):
    """It looks up a table by both ids at once."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, D)
        self.item = nn.Embedding(ITEMS, D)
        self.pair = nn.Embedding(97, D)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (
            self.user(user) * self.item(item) + self.pair((user * 31 + item) % 97)
        ).sum(1)


class Diagonal(Networks):
    """It multiplies all rows with all, and keeps the pairs."""

    def forward(self, profile: Tensor, content: Tensor) -> Tensor:
        return (self.user(profile) @ self.item(content).T).diagonal()


def changed(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return type("Changed", (Networks,), {"forward": forward})


def in_batch(model: Any, profile: Tensor, content: Tensor) -> Any:
    return model.user(profile) @ model.item(content).T


def centred(model: Any, profile: Tensor, content: Tensor) -> Any:
    rows = model.item(content)
    return (model.user(profile) * (rows - rows.mean(0))).sum(1)


def branching(model: Any, profile: Tensor, content: Tensor) -> Any:
    return model.user(profile).sum(1) + (
        model.item(content).sum(1) if profile.sum() > 0 else 0
    )


def without_item(model: Any, profile: Tensor, content: Tensor) -> Any:
    return model.user(profile).sum(1)


def two_heads(model: Any, profile: Tensor, content: Tensor) -> Any:
    return Networks.forward(model, profile, content), model.item(content)


def of_len(model: Any, profile: Tensor, content: Tensor) -> Any:
    return Networks.forward(model, profile, content.view(len(content), 3))


def of_dict(model: Any, batch: dict[str, Tensor]) -> Any:
    return Networks.forward(model, **batch)


def householder() -> nn.Module:
    model = Networks()
    orthogonal(model.user[2])
    return model


class Bagged(Networks):
    def __init__(self, mode: str, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ITEMS, 6, mode=mode)
        self.looked_up = forward

    def forward(self, history: Tensor, content: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.looked_up(self.bag, history), content)


def by_offsets(bag: Any, history: Tensor) -> Any:
    return bag(history.flatten(), torch.arange(history.shape[0]) * L)


def of_shares(bag: Any, history: Tensor) -> Any:
    return bag(history, per_sample_weights=torch.ones_like(history).float())


def of_rows(bag: Any, history: Tensor) -> Any:
    return bag(history)


RAGGED = pa.table({"content": [[0.0] * (1 + index % 2) for index in range(ITEMS)]})
WORDS = pa.table({"content": ["a"] * ITEMS})
PROFILE, CONTENT = ["profile"], ["content"]
# a module, columns of the queries and of the catalogue, and what its refusal names
REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str], Any, str]] = {
    "all pairs of a batch": (changed(in_batch), PROFILE, CONTENT, r"\(B,\) or"),
    "over the batch": (Diagonal, PROFILE, CONTENT, r"modules.py:\d+ .*'content'"),
    "a batch's mean": (changed(centred), PROFILE, CONTENT, "from its own columns"),
    "a branch": (changed(branching), PROFILE, CONTENT, r"modules.py:\d+.*`if`"),
    "len": (changed(of_len), PROFILE, CONTENT, r"x\.shape\[0\]"),
    "no item": (changed(without_item), PROFILE, CONTENT, "catalogue.features"),
    "two results": (changed(two_heads), PROFILE, CONTENT, "several values"),
    "both sides' ids": (Crossed, ["user"], ["item"], r":\d+ combines ids of 'user'"),
    "a column less": (Networks, PROFILE, ["price"], "content, which is no column"),
    "a column twice": (Networks, CONTENT, CONTENT, r"columns \['content'\]"),
    "ragged lists": (Networks, PROFILE, RAGGED, "'content': lists"),
    **{
        name: (
            functools.partial(Bagged, mode, looked_up),
            ["history"],
            CONTENT,
            r"modules.py:\d+: an EmbeddingBag takes ids .* pool an nn.Embedding",
        )
        for name, mode, looked_up in (
            ("a bag's maximum", "max", of_rows),
            ("a bag's offsets", "sum", by_offsets),
            ("a bag's weights", "sum", of_shares),
        )
    },
    "words": (Networks, PROFILE, WORDS, "'content': string"),
    "a dict": (changed(of_dict), PROFILE, CONTENT, "takes batch, which is no column"),
    "no function of ONNX": (householder, PROFILE, CONTENT, "cannot be an ONNX graph"),
}


def test_dynamic_ids_are_refused_before_anything_is_traced(tmp_path: Path) -> None:
    """docs/ids.md has the way, which its program runs."""
    model = Whole()
    optimizer = torch.optim.Adam(model.parameters())
    ids = DynamicEmbeddings(model, optimizer, {"user": Dynamic(capacity=USERS)})
    catalogue = Catalogue(ids=np.arange(ITEMS), features=table(["item"]))
    with pytest.raises(BundleError, match=r"'user' has dynamic .* live rows") as error:
        export(model, tmp_path / "b", catalogue=catalogue, queries=table(["user"]))
    assert len(str(error.value)) <= 200
    assert ids.ids.now == 0
    ids.remove()
    rows = {"user": torch.arange(3)}
    with pytest.raises(BundleError, match=r"rows: 'user' is no table of TorchRec"):
        export(
            Networks(),
            tmp_path / "b",
            catalogue=Catalogue(ids=np.arange(ITEMS), features=table(["content"])),
            queries=table(["profile"]),
            rows=rows,
        )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_and_nothing_is_written(
    name: str, tmp_path: Path
) -> None:
    make, query, item, named = REFUSED[name]
    torch.manual_seed(0)
    features = table(item) if isinstance(item, list) else item
    catalogue = Catalogue(ids=np.arange(ITEMS), features=features)
    with pytest.raises(BundleError, match=named):
        export(make(), tmp_path / "b", catalogue=catalogue, queries=table(query))
    assert not (tmp_path / "b").exists()
