"""Models of other packages, unchanged, learn under adopt() what their own loop learns.

`pip install --no-deps --target FOLDER torch-rechub recbole` (both import scikit-learn, scipy, colorlog, colorama,
texttable, thop and tabulate) brings two of them, with FOLDER on PYTHONPATH. Nothing of them is in this repository.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from torchrec_ext.adopt import CannotAdopt, adopt
from torchrec_ext.capture import executors

pytestmark = pytest.mark.slow
USERS, ITEMS, B, STEPS, D = 20_000, 10_000, 256, 12, 16
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Made = tuple[nn.Module, Loss]


def a_batch(number: int, rows: int = B) -> Batch:
    draw = torch.Generator().manual_seed(number)
    ids = {
        name: torch.randint(1, size, (rows,), generator=draw)
        for name, size in (("user_id", USERS), ("age", 9))
    }
    ids |= {
        name: torch.randint(1, ITEMS, (rows,), generator=draw)
        for name in ("item_id", "neg_item_id")
    }
    label = torch.randint(2, (rows,), generator=draw).float()
    return {**ids, "label": label, "dense": torch.rand(rows, 4, generator=draw)}


def rechub_features() -> tuple[list[Any], list[Any]]:
    features = pytest.importorskip(
        "torch_rechub.basic.features",
        reason="the package torch-rechub is not installed",
    )
    user = [
        features.SparseFeature(name, size, D)
        for name, size in (("user_id", USERS), ("age", 9))
    ]
    return user, [features.SparseFeature("item_id", ITEMS, D)]


def rechub_deepfm() -> Made:
    user, item = rechub_features()
    from torch_rechub.models.ranking.deepfm import DeepFM

    model = DeepFM(
        [*user, *item],
        [*user, *item],
        {"dims": [32, 16], "dropout": 0.0, "activation": "relu"},
    )
    return model, lambda model, batch: F.binary_cross_entropy(
        model(batch), batch["label"]
    )


class Settings(dict[str, Any]):
    """RecBole's Config: a setting that nobody gave is None."""

    def __missing__(self, key: str) -> None:
        return None


def recbole(name: str, **settings: Any) -> Made:
    models = pytest.importorskip(
        f"recbole.model.general_recommender.{name.lower()}",
        reason="the package recbole is not installed",
    )
    fields = {
        "USER_ID_FIELD": "user_id",
        "ITEM_ID_FIELD": "item_id",
        "NEG_PREFIX": "neg_",
        "LABEL_FIELD": "label",
    }
    dataset = SimpleNamespace(num=lambda field: USERS if field == "user_id" else ITEMS)
    model = getattr(models, name)(Settings(device="cpu", **fields, **settings), dataset)
    return model, lambda model, batch: model.calculate_loss(batch)  # type: ignore[operator]


def recbole_neumf() -> Made:
    sizes = {
        "mf_embedding_size": D,
        "mlp_embedding_size": D,
        "mlp_hidden_size": [32, 16],
        "dropout_prob": 0.0,
    }
    return recbole("NeuMF", mf_train=True, mlp_train=True, **sizes)


def torchrecs_dlrm(length_per_key: list[int] | None) -> Made:
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=D, num_embeddings=size, feature_names=[name]
        )
        for name, size in (("user_id", USERS), ("item_id", ITEMS))
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), 4, [8, D], [8, 1])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = torch.cat([batch["user_id"], batch["item_id"]])
        ones = torch.ones(2 * B, dtype=torch.int32)
        lists = KeyedJaggedTensor(
            ["user_id", "item_id"], ids, lengths=ones, length_per_key=length_per_key
        )
        return F.binary_cross_entropy_with_logits(
            model(batch["dense"], lists).squeeze(1), batch["label"]
        )

    return model, loss


MODELS: dict[str, Callable[[], Made]] = {
    "torch-rechub DeepFM": rechub_deepfm,
    "RecBole NeuMF": recbole_neumf,
    "TorchRec's DLRM": functools.partial(torchrecs_dlrm, [B, B]),
}


def made(
    name: str, kind: Any = torch.optim.Adam
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Batch], Tensor]]:
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    return model, kind(model.parameters(), 1e-3), lambda batch: loss(model, batch)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_package_learns_what_its_own_loop_learns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    # Adam makes full steps by a gradient that is rounding alone, as that of a bias
    # before torch-rechub's batch normalisation, and refuses DLRM's sparse gradients.
    has_sgd = "rechub" in name or "DLRM" in name
    kind = torch.optim.SGD if has_sgd else torch.optim.Adam
    model, optimizer, loss = made(name, kind)
    own = []
    for number in range(STEPS):
        optimizer.zero_grad()
        value = loss(a_batch(number))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        own.append(float(value.detach()))
    other, optimizer, loss = made(name, kind)
    step = adopt(other, optimizer, loss, compile="require")
    assert [
        float(step(a_batch(number))[0]) for number in range(STEPS)
    ] == pytest.approx(own, abs=2e-5)
    assert step.describe().startswith("captured since step 3")
    assert "row by row" in step.describe()
    weights, others = model.state_dict(), other.state_dict()
    assert list(weights) == list(others)
    assert (
        max(float((weights[key].double() - others[key]).abs().max()) for key in weights)
        < 3e-3
    )


def test_a_jagged_tensor_that_must_ask_for_its_numbers_of_ids_is_refused_with_the_remedy() -> (
    None
):
    model, loss = torchrecs_dlrm(None)
    step = adopt(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        functools.partial(loss, model),
        compile="require",
    )
    with pytest.raises(
        CannotAdopt,
        match=r"jagged_tensor\.py:\d+ .*length_per_key=\[\.\.\.\], the numbers of ids",
    ):
        list(map(step, [a_batch(0)] * 4))
