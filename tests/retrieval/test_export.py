"""What is served is what was trained, for every kind of model, alone and in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tests.contracts import mostly_slow
from tests.retrieval.kinds import (
    COLUMNS,
    ITEMS,
    KINDS,
    MOST,
    USERS,
    bag,
    columns_of,
    exported,
    made,
    table,
    trained,
)
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import DotProduct
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue
from torchrec_ext.retrieval.export import Renewal, export
from torchrec_ext.retrieval.manifest import BundleError

PRODUCTS = (
    "dot",
    "cosine",
    "next item",
    "retrieval",
)
SESSIONS = ("bst", "next item")


class First(NamedTuple):
    """The first export of the kind top_nn, whose graphs later exports renew."""

    model: Any
    bundle: Bundle
    renewal: Renewal


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    model, renewal = made("top_nn"), Renewal()
    folder = tmp_path_factory.mktemp("first") / "bundle"
    return First(model, exported("top_nn", folder, model, renewal=renewal), renewal)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "top_nn", "dot", "bst"))
def test_served_equals_trained(kind: str, first: First, tmp_path: Path) -> None:
    model, bundle = first.model.train(), first.bundle
    if kind != "top_nn":
        model = made(kind)
        bundle = exported(kind, tmp_path / "bundle", model)
        assert model.training
    assert bundle.metric == ("product" if kind in PRODUCTS else "top_nn")
    most = MOST if kind.startswith(SESSIONS) else None
    queries = table(columns_of(model, "user"))
    users = [0, 3, 7, 11, 13, 17, 29]
    several = bundle.query.embed(queries.take(users))
    for place, user in enumerate(users):
        expected = trained(model, [user] * ITEMS, range(ITEMS), most).numpy()
        allowed = 1e-5 * np.abs(expected).max() + 1e-6
        if kind == "half":
            allowed *= 20
        alone = bundle.query.embed(queries.slice(user, 1))[0]
        for query in (alone, several[place]):
            served = bundle.logits(query, np.arange(ITEMS))
            np.testing.assert_allclose(served, expected, rtol=0, atol=allowed)
            if bundle.metric == "product":
                products = bundle.rows @ query
                np.testing.assert_allclose(products, expected, rtol=0, atol=allowed)
        again = bundle.candidate.embed(table(columns_of(model, "item")).slice(user, 1))
        np.testing.assert_allclose(again[0], bundle.rows[user], atol=1e-5)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "kind", mostly_slow(["top_nn", "gmf", "bst", "next item", "own tower"], "top_nn")
)
def test_a_renewed_bundle_is_a_fresh_export(
    kind: str, first: First, tmp_path: Path
) -> None:
    renewal, digest = first.renewal, first.bundle.digest
    if kind != "top_nn":
        renewal = Renewal()
        digest = exported(kind, tmp_path / "first", renewal=renewal).digest
    other = made(kind, seed=2)
    renewed = exported(kind, tmp_path / "renewed", other, renewal=renewal)
    assert renewed.digest == exported(kind, tmp_path / "fresh", other).digest
    assert renewed.digest != digest


def test_rows_of_half_precision_say_what_they_change(
    first: First, tmp_path: Path
) -> None:
    bundle = exported(
        "top_nn", tmp_path / "bundle", store="fp16", renewal=first.renewal
    )
    assert bundle.rows.dtype == np.float16
    exact = first.bundle.manifest.parity
    parity = bundle.manifest.parity
    assert exact["greatest_difference"] < parity["greatest_difference"]
    assert parity["greatest_difference"] <= parity["allowed"]
    assert exact["allowed"] < parity["allowed"]


def test_the_bundle_holds_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    model = made("next item")
    kept = torch.arange(0, ITEMS, 2)
    items = pa.table({"item_id": np.arange(1, len(kept))})
    export(
        model,
        tmp_path / "bundle",
        catalogue=Catalogue(ids=kept[1:].numpy(), features=items),
        queries=pa.table({"session": [[1, 2, 3], [len(kept) - 1]]}),
        rows={"films": kept},
    )
    bundle = Bundle.load(tmp_path / "bundle")
    (file,) = bundle.manifest.content["tables"].values()
    held = np.load(bundle.folder / file)
    assert len(held) == len(kept)
    weight = model.embeddings.embeddings["films"].weight.detach().numpy()
    np.testing.assert_array_equal(bundle.rows, weight[kept[1:].numpy()])


def export_of(model: nn.Module, folder: Path, **options: Any) -> None:
    features = table(columns_of(model, "item"))
    given = {
        "catalogue": Catalogue(ids=np.arange(ITEMS), features=features),
        "queries": table(columns_of(model, "user")),
    }
    export(model, folder, **{**given, **options})


def test_an_index_of_logits_that_are_no_product_is_refused(
    first: First, tmp_path: Path
) -> None:
    pytest.importorskip("faiss")
    with pytest.raises(BundleError, match=r"index='HNSW8': FAISS searches products"):
        export_of(
            first.model, tmp_path / "bundle", index="HNSW8", renewal=first.renewal
        )


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    model = made("dot")
    out = tmp_path / "bundle"
    with pytest.raises(BundleError, match=r"column 'profile': the model reads it, and"):
        export_of(model, out, queries=table(["user_id", "history", "age"]))
    with pytest.raises(BundleError, match=r"store='int8': must be one of fp32, fp16"):
        export_of(model, out, store="int8")
    with pytest.raises(BundleError, match=r"recall=2: must be greater than 0 and at"):
        export_of(model, out, recall=2)
    with pytest.raises(BundleError, match=r"queries: there are no rows to audit by"):
        export_of(model, out, queries=None)
    features = table(columns_of(model, "item"))
    prices = [*COLUMNS["price"]]
    prices[5] = None
    place = features.column_names.index("price")
    items = features.set_column(place, "price", pa.array(prices, pa.float32()))
    wrong = Catalogue(ids=np.arange(ITEMS) + 100, features=items)
    with pytest.raises(ValueError, match=r"item 105, column 'price', row 5"):
        export_of(model, out, catalogue=wrong)
    weight = model.towers["item"].mlp[-1].weight
    with torch.no_grad():
        weight *= 1e6
    with pytest.raises(BundleError, match=r"item 0: .* in fp16; .* take store=fp32"):
        export_of(model, out, store="fp16")
    with torch.no_grad():
        weight /= 1e6
        model.towers["user"].mlp[0].weight[0, 0] = torch.nan
    with pytest.raises(BundleError, match=r"gives NaN or infinity as a logit"):
        export_of(model, out)
    both = TowerModel(
        {
            "user": Tower([bag("user_id", USERS)], [8]),
            "item": Tower([bag("item_id", ITEMS), bag("user_id", USERS)], [8]),
        },
        DotProduct([8, 8]),
    )
    with pytest.raises(
        BundleError, match=r"column 'user_id': tower 'item' and user read"
    ):
        export_of(both, out, queries=table(["user_id"]))
    assert not out.exists()
