"""A module of a user's own is served as it was trained, whatever it is made of, or is refused by name."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain

from torchrec_ext.retrieval.bundle.architecture import rebuild
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.operators import _ATEN, OPERATORS
from torchrec_ext.retrieval.bundle.program import Program
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.retrieval.scorer.requests import (
    EmbedRequest,
    RecommendRequest,
    RequestError,
    ScoreRequest,
)
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.server.openapi import example_user

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
    """A batch as a dict, ids with offsets into one table, biases of both, a bounded score."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(USERS + ITEMS, D)
        self.bias = nn.Embedding(USERS + ITEMS, 1)
        self.register_buffer("offset", torch.tensor([0, USERS]))
        self.layer = nn.Linear(D, D)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user, item = batch["user"] + self.offset[0], batch["item"] + self.offset[1]
        score = (self.layer(self.rows(user)) * self.rows(item)).sum(-1, keepdim=True)
        return torch.tanh(score + self.bias(user) + self.bias(item)) * 5


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    towers: dict[str, Any]
    query: list[str]
    item: list[str]
    interaction: str


CASES = {
    "two networks": Case(
        Networks, {"user": "user", "item": "item"}, ["profile"], ["content"], "TopMLP"
    ),
    "item first": Case(
        lambda: Networks("content"),
        {"a": "user", "b": "item"},
        ["profile"],
        ["content"],
        "TopMLP",
    ),
    "layers of pairs": Case(
        Mixed,
        {"user": ["gmf_user", "mlp_user"], "item": ["gmf_item", "mlp_item"]},
        ["user", "profile"],
        ["item"],
        "ProgramTop",
    ),
    "sessions": Case(
        Sessions,
        {"user": ["gru", "layer"], "item": "item"},
        ["history"],
        ["item", "price"],
        "DotProduct",
    ),
    "offsets": Case(
        Biased, {"user": "layer", "item": "bias"}, ["user"], ["item"], "ProgramTop"
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
}


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


def exported(name: str, folder: Path, **options: Any) -> tuple[nn.Module, Bundle]:
    case = CASES[name]
    model = made(case)
    catalogue = Catalogue(ids=np.arange(ITEMS) + FIRST, features=table(case.item))
    export(
        model,
        folder,
        towers=case.towers,
        catalogue=catalogue,
        queries=table(case.query),
        **options,
    )
    assert model.training
    return model, Bundle.load(folder)


@torch.no_grad()
def own(model: nn.Module, case: Case, user: int) -> Tensor:
    """Logits (I,) of a user with all items by the user's own forward."""
    columns = {
        name: torch.from_numpy(COLUMNS[name]) for name in (*case.query, *case.item)
    }
    columns |= {name: columns[name][[user] * ITEMS] for name in case.query}
    model.eval()
    return model(columns) if isinstance(model, Biased) else model(**columns)  # type: ignore[no-any-return]


def row(case: Case, user: int) -> dict[str, Any]:
    return {name: COLUMNS[name][user].tolist() for name in case.query}


@pytest.mark.parametrize("name", CASES)
def test_what_is_served_is_what_was_trained(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, bundle = exported(name, tmp_path / "bundle")
    assert type(bundle.interaction).__name__ == case.interaction
    scorer, ids = Scorer(bundle), list(range(FIRST, FIRST + ITEMS))
    for user in (0, 7, USERS - 1):
        expected = own(model, case, user).flatten()
        scores = torch.tensor(
            scorer.score(ScoreRequest(user=row(case, user), items=ids)).scores
        )
        torch.testing.assert_close(
            scores, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max()))
        )
        best = scorer.recommend(RecommendRequest(user=row(case, user), k=5))
        assert best.items == [ids[index] for index in expected.topk(5).indices.tolist()]
        assert not best.cold.unknown_features
    # The served page begins with someone whom a request may name as it stands.
    assert (
        len(
            scorer.recommend(
                RecommendRequest(user=example_user(bundle, private=True), k=5)
            ).items
        )
        == 5
    )
    items = [
        {column: COLUMNS[column][index].tolist() for column in case.item}
        for index in (0, 3)
    ]
    again = scorer.embed(EmbedRequest(side="candidate", rows=items)).vectors
    torch.testing.assert_close(
        again, bundle.store.rows(torch.tensor([0, 3])), rtol=0, atol=1e-6
    )


@torch.no_grad()
def test_a_dlrm_of_torchrec_is_served_as_it_was_trained(tmp_path: Path) -> None:
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
    model = DLRMTrain(
        DLRM_DCN(EmbeddingBagCollection(tables=tables), 6, [D], [8, 1], 2, 4)
    )
    numbers = COLUMNS["profile"]
    queries = table(["user", "history"]).append_column(
        "dense_features", [numbers.tolist()]
    )
    catalogue = Catalogue(
        ids=np.arange(ITEMS), features=pa.table({"item": np.arange(ITEMS)})
    )
    export(model, tmp_path / "bundle", catalogue=catalogue, queries=queries)
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
        torch.from_numpy(numbers)[[7] * ITEMS], features
    ).flatten()
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-6)
    with pytest.raises(
        BundleError,
        match=r"DLRM_DCN reads dense_features, user, item, history; .*missing: dense_feat",
    ):
        export(
            model,
            tmp_path / "none",
            catalogue=catalogue,
            queries=table(["user", "history"]),
        )
    with pytest.raises(
        BundleError, match=r"reads dense_features, .* some in both; missing: one side"
    ):
        export(
            model,
            tmp_path / "none",
            catalogue=Catalogue(ids=np.arange(1), features=pa.table({"x": [1]})),
            queries=queries.append_column("item", [list(range(USERS))]),
        )


def test_the_service_knows_nothing_of_the_users_class(tmp_path: Path) -> None:
    """Over HTTP, from the folder alone, users by their ids."""
    pytest.importorskip("uvicorn", reason="needs the extra `serve`")
    from tests.retrieval.server.running import running_server

    case = CASES["layers of pairs"]
    nobody = pa.array([[]] * USERS, type=pa.list_(pa.int64()))
    users = NamedUsers(
        key="user",
        ids=COLUMNS["user"],
        features=table(case.query),
        unknown={"user": 0, "profile": [0.0] * 6},
        seen=nobody,
        liked=nobody,
    )
    model, bundle = exported("layers of pairs", tmp_path / "bundle", users=users)
    with running_server(bundle) as running:
        answer = running.client().post("/v1/recommend", {"user": {"user": 4}, "k": 3})
    expected = own(model, case, 4).flatten().topk(3)
    assert answer.json["items"] == [
        FIRST + index for index in expected.indices.tolist()
    ]
    assert answer.json["scores"] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_a_top_nn_stores_the_items_half_of_its_first_layer(tmp_path: Path) -> None:
    model, bundle = exported("two networks", tmp_path / "bundle")
    assert bundle.projection.projected
    assert bundle.projected.width == 6
    assert bundle.metric == "top_nn"
    with torch.no_grad():
        content = torch.from_numpy(COLUMNS["content"])
        half = F.linear(model.item(content).relu(), model.top[1].weight[:, D:])  # type: ignore[operator, union-attr, index]
    torch.testing.assert_close(
        bundle.projected.rows(torch.arange(ITEMS)), half, rtol=0, atol=1e-6
    )


@pytest.mark.slow
def test_a_table_of_both_towers_is_kept_once_and_in_a_byte_a_number_where_asked(
    tmp_path: Path,
) -> None:
    _, trained = exported("sessions", tmp_path / "trained")
    assert trained.architecture.tables == {"items/weight": "tables/000.safetensors"}
    _, rounded = exported("sessions", tmp_path / "int8", tables="int8", overlap=0.5)
    assert rounded.manifest.content["tables"]["bytes"] == ITEMS * (D + 4)


def test_an_unknown_id_is_refused_or_read_as_the_row_that_the_user_names(
    tmp_path: Path,
) -> None:
    case = CASES["layers of pairs"]
    nobody = row(CASES["layers of pairs"], 0) | {"user": USERS}
    model, strict = exported("layers of pairs", tmp_path / "strict")
    refused = (
        rf"column 'user': {USERS} is no row of table .*'gmf_user/weight', which has "
        rf"the rows 0 to {USERS - 1}; send"
    )
    with pytest.raises(RequestError, match=refused):
        Scorer(strict).score(ScoreRequest(user=nobody, items=[FIRST]))
    with pytest.raises(
        RequestError,
        match=r"not in the catalogue, and column 'item': the model has no .* oov_ids=\{'item': ROW\}",
    ):
        Scorer(strict).score(ScoreRequest(user=row(case, 0), items=[FIRST, 7]))
    _, named = exported(
        "layers of pairs", tmp_path / "named", oov_ids={"user": 3, "item": 0}
    )
    scores = Scorer(named).score(ScoreRequest(user=nobody, items=[FIRST, 7]))
    assert scores.cold.unknown_features == ["user"]
    assert scores.unknown_items == [7]
    columns = {"user": torch.tensor([3, 3]), "item": torch.tensor([ITEMS - 1, 0])}
    with torch.no_grad():
        expected = model.eval()(
            **columns, profile=torch.from_numpy(COLUMNS["profile"])[[0, 0]]
        ).flatten()
    assert scores.scores == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_new_item_reads_the_row_of_unknown_ids_or_is_refused_by_name(
    tmp_path: Path,
) -> None:
    case = CASES["layers of pairs"]
    model = made(case)
    new = {"item": np.append(COLUMNS["item"], ITEMS + 7)}
    catalogue = Catalogue(ids=np.arange(ITEMS + 1), features=pa.table(new))
    both: Any = {
        "towers": case.towers,
        "catalogue": catalogue,
        "queries": table(case.query),
    }
    with pytest.raises(
        ValueError,
        match=rf"column 'item': {ITEMS + 7} is no row of table .* oov_ids={{'item': ROW}}",
    ):
        export(model, tmp_path / "strict", **both)
    export(model, tmp_path / "bundle", **both, oov_ids={"item": 0})
    scores = Scorer(Bundle.load(tmp_path / "bundle")).score(
        ScoreRequest(
            user=row(case, 3), items=[ITEMS, int((COLUMNS["item"] == 0).argmax())]
        )
    )
    assert scores.scores[0] == pytest.approx(scores.scores[1], abs=1e-6)
    assert scores.unknown_items == []


def test_columns_that_no_tower_reads_leave_the_towers_digests(tmp_path: Path) -> None:
    case = CASES["two networks"]
    model, bundle = exported("two networks", tmp_path / "bundle")
    queries = table(case.query).append_column("note", pa.array(["x"] * USERS))
    catalogue = Catalogue(
        ids=np.arange(ITEMS),
        features=table(case.item).append_column("year", pa.array([1] * ITEMS)),
    )
    export(
        model,
        tmp_path / "more",
        towers=case.towers,
        catalogue=catalogue,
        queries=queries,
    )
    assert Bundle.load(tmp_path / "more").query_digest == bundle.query_digest


def test_lists_and_computed_ids_that_do_not_fit_are_refused_by_name(
    tmp_path: Path,
) -> None:
    _, sessions = exported("sessions", tmp_path / "sessions")
    with pytest.raises(
        RequestError,
        match=r"column 'history', row 0: 2 ids, must be 4; send as many, padded as in",
    ):
        Scorer(sessions).score(ScoreRequest(user={"history": [1, 2]}, items=[FIRST]))
    _, offsets = exported("offsets", tmp_path / "offsets")
    for user in (-1, USERS + ITEMS):
        with pytest.raises(
            RequestError,
            match=r"columns 'user': an id made of them is no row of its table",
        ):
            Scorer(offsets).score(ScoreRequest(user={"user": user}, items=[FIRST]))
    with pytest.raises(
        RequestError, match=r"column 'user': whole numbers must be below 16,777,216"
    ):
        Scorer(offsets).score(ScoreRequest(user={"user": 2**24 + 1}, items=[FIRST]))


class Reading(Networks):
    """Its item network reads the profile too."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Linear(9, D)  # type: ignore[assignment]

    def forward(self, profile: Tensor, content: Tensor) -> Tensor:
        both = self.item(torch.cat([content, profile], 1))
        return self.top(torch.cat([self.user(profile), both], 1))  # type: ignore[no-any-return]


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


def changed(forward: Callable[[Any, Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
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


BOTH = {"user": "user", "item": "item"}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a tower of both": (
        Reading,
        BOTH,
        r"towers: item='item' reads profile, \S+test_own_modules.py:\d+, which the queries have, so its output cannot "
        r"be stored for each candidate; name modules that read columns of catalogue.features alone",
    ),
    "the other tower": (
        Networks,
        {"user": "item", "item": "user"},
        r"towers: user='item' reads no column of queries",
    ),
    "no such module": (
        Networks,
        {"user": "user", "item": "items"},
        r"item='items' is no module of Networks: user, user.0",
    ),
    "three towers": (
        Networks,
        {**BOTH, "top": "top"},
        r"3 names; give two, of what reads the queries and of what reads",
    ),
    "all pairs of a batch": (
        changed(in_batch),
        BOTH,
        r"forward returns \(.*\), must be logits \(B,\) or \(B, 1\)",
    ),
    "over the batch": (
        Diagonal,
        BOTH,
        r"test_own_modules.py:\d+ combines 'content' of the catalogue over all rows",
    ),
    "a batch's mean": (
        changed(centred),
        BOTH,
        r"forward's logit of row 0 is .* among 64 rows and .* among 3: it depends on",
    ),
    "a branch": (
        changed(branching),
        BOTH,
        r"forward of Changed cannot be traced.*`if` on values, .item\(\) and boolean",
    ),
    "len": (
        changed(of_len),
        BOTH,
        r"of Changed fixes the number of rows to 64; read sizes as x.shape\[0\] instead of len",
    ),
    "no item": (
        changed(without_item),
        {"user": "user", "item": "item"},
        r"depend on no column of catalogue.features",
    ),
    "two results": (
        changed(two_heads),
        BOTH,
        r"forward returns several values, must be logits",
    ),
}


def refused(model: nn.Module, towers: Any, folder: Path, **columns: Any) -> str:
    query, item = columns.pop("query", ["profile"]), columns.pop("item", ["content"])
    catalogue = Catalogue(
        ids=np.arange(ITEMS),
        features=item if isinstance(item, pa.Table) else table(item),
    )
    with pytest.raises(BundleError) as caught:
        export(
            model,
            folder,
            towers=towers,
            catalogue=catalogue,
            queries=table(query),
            **columns,
        )
    assert not folder.exists()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_with_line_and_remedy(
    name: str, tmp_path: Path
) -> None:
    make, towers, text = REFUSED[name]
    torch.manual_seed(0)
    message = refused(make(), towers, tmp_path / "bundle")
    assert re.search(text, message), message


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    crossed = refused(
        Crossed(), BOTH, tmp_path / "bundle", query=["user"], item=["item"]
    )
    assert re.search(
        r":\d+ combines ids or masks of 'user' with the other tower's columns, so 'user' has",
        crossed,
    )
    lacking = refused(
        Networks(), BOTH, tmp_path / "bundle", query=["profile"], item=["price"]
    )
    assert (
        "forward of Networks takes content, which is no column; the columns are profile, price"
        in lacking
    )
    twice = refused(Networks(), BOTH, tmp_path / "bundle", query=["content"])
    assert "columns ['content']: are columns of queries and of the catalogue" in twice
    ragged = pa.table({"content": [[0.0] * (1 + index % 2) for index in range(ITEMS)]})
    assert "column 'content': lists of different lengths" in refused(
        Networks(), BOTH, tmp_path / "bundle", item=ragged
    )
    words = pa.table({"content": ["a"] * ITEMS})
    assert "column 'content': string; an own module reads whole" in refused(
        Networks(), BOTH, tmp_path / "b", item=words
    )
    without = refused(Networks(), None, tmp_path / "bundle")
    assert "a Networks cannot be exported" in without
    assert "towers={'user': PATH, 'item': PATH}" in without


def test_a_bundle_can_name_no_other_operator_and_no_value_that_was_not_computed(
    tmp_path: Path,
) -> None:
    exported("two networks", tmp_path / "bundle")
    described = json.loads((tmp_path / "bundle" / "architecture.json").read_text())[
        "towers"
    ][0][1]
    assert rebuild(described)
    (node, *_) = described["arguments"]["nodes"]
    for operator in (
        "from_file.default",
        "set_.source_Storage",
        "relu_.default",
        "__class__",
        "save",
    ):
        node[0] = operator
        with pytest.raises(
            BundleError,
            match=f"operator '{operator}' is not one that a bundle may name",
        ):
            rebuild(described)
    assert not [
        name
        for name in _ATEN.split()
        if getattr(OPERATORS.get(name), "_schema", None) is None
    ]
    assert not [name for name in _ATEN.split() if OPERATORS[name]._schema.is_mutable]  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="'#1' refers to nothing that was computed before"
    ):
        Program(
            [["relu.default", ["#1"], {}], ["relu.default", ["@a"], {}]],
            {"@a": (torch.float32, ())},
            {},
            ["#1"],
        )


@pytest.mark.slow
def test_the_example_serves_what_its_script_trained(tmp_path: Path) -> None:
    examples = Path(__file__).parents[3] / "examples"
    torch.manual_seed(0)
    torch.save(
        runpy.run_path(str(examples / "towers_script.py"))[
            "UserAndItem"
        ]().state_dict(),
        tmp_path / "towers.pt",
    )
    command = [
        sys.executable,
        str(examples / "towers_served.py"),
        str(tmp_path / "towers.pt"),
        str(tmp_path / "bundle"),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    served, trained = (line.split(maxsplit=1) for line in run.stdout.splitlines()[-2:])
    assert (served[0], trained[0]) == ("served", "trained")
    assert served[1] == trained[1]
