"""A bundle as ONNX files: numpy and onnxruntime alone give its logits, and a changed weight is noticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig

from tests.examples import DIM, ITEMS, USERS, table
from tests.retrieval.bundles import bundle_of, contents, model_of
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import INTERACTIONS, TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.retrieval.onnx import onnx_bundle
from torchrec_ext.retrieval.onnx.layers import ExportError
from torchrec_ext.retrieval.onnx.onnx_bundle import (
    check_exportable,
    check_onnx,
    export_bundle,
)

onnx = pytest.importorskip(
    "onnx", reason="the package onnx is not installed (extra `onnx`)"
)
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="the package onnxruntime is not installed (extra `onnx`)"
)
pytest.importorskip(
    "onnxscript", reason="the package onnxscript is not installed (extra `onnx`)"
)


def run(path: Path, **given: Any) -> Any:
    session = onnxruntime.InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    return session.run(
        None, {name: np.asarray(value) for name, value in given.items()}
    )[0]


def float32(*values: float) -> Any:
    return np.array(values, np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    root = tmp_path_factory.mktemp("onnx")
    bundle = bundle_of(root / "bundle")
    assert max(export_bundle(bundle, root / "onnx")["differences"].values()) < 1e-5
    return bundle, root / "onnx"


def test_a_tower_with_a_history_is_equal_for_lists_of_any_length(
    made: tuple[Bundle, Path],
) -> None:
    bundle, folder = made
    rows = {
        "user_id": [3, 4, 5],
        "history": [[1, 2, 2, 30], [], [7]],
        "age": [0.1, 0.2, 0.3],
    }
    history = np.array([[1, 2, 2, 30], [-1] * 4, [7, -1, -1, -1]])
    many = run(
        folder / "towers/user.onnx",
        user_id=[3, 4, 5],
        history=history,
        age=float32(0.1, 0.2, 0.3),
    )
    np.testing.assert_allclose(many, bundle.embed_query(rows), atol=1e-5)
    one = run(
        folder / "towers/user.onnx",
        user_id=[3],
        history=[[1, 2, 2, 30]],
        age=float32(0.1),
    )
    np.testing.assert_allclose(one, many[:1], atol=1e-6)
    empty = run(
        folder / "towers/user.onnx",
        user_id=[4],
        history=np.zeros((1, 0), np.int64),
        age=float32(0.2),
    )
    np.testing.assert_allclose(empty, many[1:2], atol=1e-6)


def test_an_id_that_is_no_row_is_the_unknown_as_in_a_request(
    made: tuple[Bundle, Path],
) -> None:
    bundle, folder = made
    known = bundle.embed_query(
        {"user_id": [10_000], "history": [[1, 999]], "age": [0.5]}
    )
    for stranger in (10_000, USERS, -1, -7):
        found = run(
            folder / "towers/user.onnx",
            user_id=[stranger],
            history=[[1, ITEMS]],
            age=float32(0.5),
        )
        np.testing.assert_allclose(found, known, atol=1e-5)


def test_the_program_of_the_readme_recommends_what_the_bundle_does(
    made: tuple[Bundle, Path],
) -> None:
    bundle, folder = made
    program = re.search(
        r"```py\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL
    )
    assert program is not None
    assert not {"torch", "torchrec_ext", "pyarrow"} & set(
        re.findall(r"import (\w+)", program[1])
    )
    done = subprocess.run(
        [sys.executable, "-c", program[1]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    users = bundle.users
    assert users is not None
    _, positions = bundle.index.search(bundle.embed_query(users.rows([0])), 10)
    assert done.stdout.startswith(
        str(bundle.store.ids.ids(positions[0].numpy()).tolist())
    )


@pytest.mark.parametrize("part", ["user", "item", "top"])
def test_a_changed_weight_is_noticed_and_named(
    part: str, made: tuple[Bundle, Path]
) -> None:
    bundle, folder = made
    path = folder / (f"towers/{part}.onnx" if part != "top" else "top.onnx")
    before = path.read_bytes()
    model = onnx.load(path)
    weight = max(
        (each for each in model.graph.initializer if each.data_type == 1),
        key=lambda each: len(each.raw_data),
    )
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[:] += 0.01
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, path)
    try:
        with pytest.raises(
            ExportError,
            match=rf"{part}'?: {part}\.onnx differs from the bundle by up to",
        ):
            check_onnx(bundle, folder)
    finally:
        path.write_bytes(before)
    check_onnx(bundle, folder)


def test_nothing_of_this_machine_is_in_a_file(made: tuple[Bundle, Path]) -> None:
    root = str(Path(__file__).parents[3]).encode()
    assert not [path for path in made[1].rglob("*.onnx") if root in path.read_bytes()]


def of(root: Path, model: TowerModel, users: dict[str, Any] | None = None) -> Bundle:
    """A bundle of ``model`` over the small catalogue, with further columns of the users."""
    given = contents()
    for name, values in (users or {}).items():
        object.__setattr__(
            given["users"],
            "features",
            given["users"].features.append_column(name, pa.array(values)),
        )
        object.__setattr__(
            given["users"], "unknown", {**given["users"].unknown, name: values[0]}
        )
    export(model.eval(), root / "bundle", **given)
    return Bundle.load(root / "bundle")


@pytest.mark.slow
def test_contextual_ncf_is_equal(tmp_path: Path) -> None:
    hour = EmbeddingBagConfig(
        name="hour", feature_names=["hour"], num_embeddings=25, embedding_dim=4
    )
    torch.manual_seed(0)
    model = ContextualNCF(
        USERS, ITEMS, context_tables=[hour], context_dense=["age"], embedding_std=1.0
    )
    bundle = of(tmp_path, model, {"hour": [user % 25 for user in range(1, USERS)]})
    assert set(export_bundle(bundle, tmp_path / "onnx")["differences"]) == {
        "user",
        "item",
        "top",
    }
    found = run(
        tmp_path / "onnx/towers/user.onnx", user_id=[7], hour=[9], age=float32(0.3)
    )
    np.testing.assert_allclose(
        found,
        bundle.embed_query({"user_id": [7], "hour": [9], "age": [0.3]}),
        atol=1e-5,
    )


@pytest.mark.slow
def test_weights_attention_fp16_and_a_table_of_two_towers_are_equal(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    lengths = (
        contents()["users"]
        .features["history"]
        .combine_chunks()
        .value_lengths()
        .to_pylist()
    )
    shared = EmbeddingConfig(
        name="film", feature_names=["history"], num_embeddings=ITEMS, embedding_dim=DIM
    )
    genres = table("genres", 9, pooling=PoolingType.SUM)
    user = Tower(
        [shared, genres, table("user_id", USERS, data_type=DataType.FP16)],
        [8],
        dense=["age"],
        weights={"genres": "shares"},
    )
    again = EmbeddingBagConfig(
        name="tag", feature_names=["history"], num_embeddings=ITEMS, embedding_dim=DIM
    )
    context = Tower(
        [again, table("hour", 24)],
        [4],
        compress=Compression(dim=4, per_feature=1, flat=1),
        normalization="layer",
    )
    item = Tower([table("item_id", ITEMS)], [8], dense=["price"])
    model = TowerModel(
        {"user": user, "context": context, "item": item}, TopMLP([8, 4, 8], [8])
    )
    for weight in model.parameters():
        nn.init.normal_(weight)
    columns = {
        "genres": [rng.integers(0, 9, length).tolist() for length in lengths],
        "shares": [
            rng.random(length).astype(np.float32).tolist() for length in lengths
        ],
        "hour": [user % 24 for user in range(len(lengths))],
    }
    bundle = of(tmp_path, model, columns)
    description = export_bundle(bundle, tmp_path / "onnx")
    assert {
        name: [each["name"] for each in own["inputs"]]
        for name, own in description["towers"].items()
    } == {
        "user": ["genres", "shares", "user_id", "history", "age"],
        "context": ["history", "hour"],
        "item": ["item_id", "price"],
    }


@pytest.mark.parametrize("interaction", INTERACTIONS)
@pytest.mark.slow
def test_every_interaction_of_the_registry_is_equal(
    interaction: str, tmp_path: Path
) -> None:
    small = model_of()
    kind = INTERACTIONS[interaction]
    model = TowerModel(dict(small.towers.items()), kind([8, 8]))  # type: ignore[arg-type]
    description = export_bundle(of(tmp_path, model), tmp_path / "onnx")
    if not kind.projectable:
        assert description["top"]["inputs"][0]["shape"] == [8]


@pytest.mark.slow
def test_large_tables_stand_beside_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_bundle, "_INLINE", 1000)
    export_bundle(bundle_of(tmp_path / "bundle", "dot"), tmp_path / "onnx")
    assert sorted(path.name for path in (tmp_path / "onnx/towers").iterdir()) == [
        "item.onnx",
        "item.onnx.data",
        "user.onnx",
        "user.onnx.data",
    ]


def test_refused(
    made: tuple[Bundle, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, folder = made
    towers = {"session": "NextItemTower", "item": "Tower"}
    with pytest.raises(
        ExportError,
        match=r"tower 'session': a NextItemTower cannot .* add --onnx-skip session",
    ):
        check_exportable(towers)
    check_exportable(towers, ["session"])
    with pytest.raises(ValueError, match="'sesion' is none of session, item, top"):
        check_exportable(towers, ["sesion"])
    with pytest.raises(ValueError, match="there is something already"):
        export_bundle(bundle, folder)
    with pytest.raises(
        ValueError, match="in it, or around it; choose a folder beside it"
    ):
        export_bundle(bundle, bundle.folder / "onnx")
    description = export_bundle(bundle, tmp_path / "part", skip=["user", "top"])
    assert list(description["towers"]) == list(description["differences"]) == ["item"]
    assert "Left out: top, user." in (tmp_path / "part" / "README.md").read_text()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        ValueError,
        match=r"needs the package onnxscript: pip install 'torchrec-ext\[onnx\]'",
    ):
        export_bundle(bundle, tmp_path / "x")
