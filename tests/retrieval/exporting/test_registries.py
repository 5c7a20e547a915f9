"""Each row format and kind of index goes through export, load and search, and the flags of the commands name it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import DIM
from tests.retrieval.small_bundle import FIRST_ITEM, SmallBundle
from torchrec_ext.retrieval.bundle.architecture import Int8Table
from torchrec_ext.retrieval.bundle.audit import Audit
from torchrec_ext.retrieval.bundle.bundle import Bundle, _check_weights
from torchrec_ext.retrieval.bundle.index_kinds import INDEX_KINDS
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.exporting import content
from torchrec_ext.retrieval.exporting.content import ExportConfig
from torchrec_ext.retrieval.scorer.requests import ScoreRequest
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.store.row_formats import ROW_FORMATS, RowFormat

USERS = np.arange(1, 9)


def rankings(bundle: Bundle, k: int = 5) -> list[set[int]]:
    """The ids of the best ``k`` items of some users, by the bundle's index."""
    assert bundle.users is not None
    positions = bundle.index.search(
        bundle.embed_query(bundle.users.rows(bundle.users.ids.positions(USERS))), k
    )[1]
    return [set(bundle.store.ids.ids(row).tolist()) for row in positions.numpy()]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[set[int]]:
    return rankings(
        SmallBundle(
            tmp_path_factory.mktemp("exact") / "bundle", interaction="dot"
        ).bundle
    )


@pytest.mark.parametrize("dtype", ROW_FORMATS)
def test_every_row_format_is_exported_and_searched(
    dtype: str, tmp_path: Path, exact: list[set[int]]
) -> None:
    bundle = SmallBundle(tmp_path / "bundle", interaction="dot", store=dtype).bundle
    assert (bundle.store.dtype, bundle.manifest.content["store"]["dtype"]) == (
        dtype,
        dtype,
    )
    same = sum(
        len(found & best) for found, best in zip(rankings(bundle), exact, strict=True)
    )
    assert same == 40 if ROW_FORMATS[dtype].exact else same >= 36


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_every_kind_of_index_is_exported_and_searched(
    kind: str, tmp_path: Path, exact: list[set[int]]
) -> None:
    if kind != "exact":
        pytest.importorskip(
            "faiss", reason="the package faiss-cpu is not installed (extra `retrieval`)"
        )
    bundle = SmallBundle(
        tmp_path / "bundle", interaction="dot", index=kind, recall=0.9
    ).bundle
    assert bundle.manifest.content["index"]["kind"] == kind
    assert bundle.manifest.recall >= 0.9
    same = sum(
        len(found & best) for found, best in zip(rankings(bundle), exact, strict=True)
    )
    assert same == 40 if bundle.manifest.recall == 1 else same >= 36


def rounded(model: torch.nn.Module) -> None:
    """Rounds every table of ``model`` to int8 with a scale for each row, by hand."""
    for table in (
        module
        for module in model.modules()
        if isinstance(module, torch.nn.EmbeddingBag)
    ):
        scales = table.weight.abs().amax(dim=1, keepdim=True) / 127
        table.weight.data = (table.weight / scales).round() * scales


@pytest.mark.parametrize("interaction", ["top_nn", "dot", "cosine"])
def test_int8_tables_score_as_the_model_with_rounded_tables_within_what_the_manifest_says(
    interaction: Any, tmp_path: Path
) -> None:
    trained = SmallBundle(tmp_path / "trained", interaction=interaction)
    small = SmallBundle(
        tmp_path / "int8", interaction=interaction, tables="int8", overlap=0.8
    )
    loss = small.bundle.manifest.content["tables"]
    assert "tables" not in trained.bundle.manifest.content
    users = np.repeat(USERS, 49)
    items = np.tile(np.arange(FIRST_ITEM, FIRST_ITEM + 49), len(USERS))
    exact = small.logits(users, items)
    rounded(small.model)
    expected = small.logits(users, items).view(len(USERS), 49)
    scorer = Scorer(small.bundle)
    for user, logits in zip(USERS.tolist(), expected, strict=True):
        ids = list(range(FIRST_ITEM, FIRST_ITEM + 49))
        scores = torch.tensor(
            scorer.score(ScoreRequest(user={"user_id": user}, items=ids)).scores
        )
        torch.testing.assert_close(scores, logits, rtol=0, atol=2e-5)
    assert 0 < float((expected.flatten() - exact).abs().max()) <= 2 * loss["allowed"]
    assert loss["greatest_difference"] <= loss["allowed"]
    pairs, promised = Audit.open(small.folder)
    ages = [row["user_id"] for row in pairs.queries.to_pylist()]
    whole = trained.logits(np.array(ages), np.asarray(pairs.ids))
    assert float((promised - whole).abs().max()) == pytest.approx(
        loss["greatest_difference"], rel=1e-3
    )
    sizes = {
        name: sum(
            path.stat().st_size for path in (tmp_path / name / "tables").iterdir()
        )
        for name in ("trained", "int8")
    }
    # a byte a number, and four for a row's scale
    assert loss["bytes"] * 4 * DIM == loss["bytes_trained"] * (DIM + 4)
    assert sizes["trained"] - sizes["int8"] >= 0.9 * (
        loss["bytes_trained"] - loss["bytes"]
    )


def test_a_row_and_a_batch_of_int8_tables_have_one_vector(tmp_path: Path) -> None:
    bundle = SmallBundle(tmp_path / "bundle", tables="int8", overlap=0.8).bundle
    assert bundle.users is not None
    rows = bundle.users.rows(bundle.users.ids.positions(USERS))
    together = bundle.embed_query(rows)
    for at, vector in enumerate(together):
        alone = bundle.embed_query(
            {name: values[at : at + 1] for name, values in rows.items()}
        )
        torch.testing.assert_close(alone[0], vector, rtol=0, atol=1e-6)


def test_int8_tables_that_lose_too_much_are_refused_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "LOGIT_SHARE", 1e-6)
    with pytest.raises(
        BundleError,
        match=r"tables=int8: 256 logits differ by up to .*, at most 1e-06 is allowed, and",
    ):
        SmallBundle(tmp_path / "bundle", tables="int8", overlap=0.8)
    assert not (tmp_path / "bundle").exists()


def test_a_scale_that_is_no_number_is_found(tmp_path: Path) -> None:
    folder = SmallBundle(tmp_path / "bundle", tables="int8", overlap=0.8).folder
    encoder = Bundle.load(folder, verify=False).encoders[0]
    (table, *_) = [
        module for module in encoder.model.modules() if isinstance(module, Int8Table)
    ]
    table.scales = table.scales.clone()
    table.scales[3] = float("nan")
    with pytest.raises(BundleError, match="row 3: its scale is NaN or infinity"):
        _check_weights(folder, encoder.model)


class BrainFloats(RowFormat):
    """A format of a user's own: one class, one line in the registry."""

    name = "bf16"
    numbers = torch.bfloat16

    def rounding(self, greatest: float) -> float:
        return greatest * 2**-8


def test_a_new_row_format_is_one_class_and_one_line(
    tmp_path: Path, exact: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match="store='bf16': must be one of fp32, fp16, int8"
    ):
        ExportConfig(store="bf16")
    monkeypatch.setitem(ROW_FORMATS, "bf16", BrainFloats())
    bundle = SmallBundle(tmp_path / "bundle", interaction="dot", store="bf16").bundle
    assert bundle.store.matrix().dtype == torch.bfloat16
    assert bundle.store.ids.ids([0]).tolist() == [FIRST_ITEM]
    assert (
        sum(
            len(found & best)
            for found, best in zip(rankings(bundle), exact, strict=True)
        )
        >= 32
    )


@pytest.mark.parametrize(
    ("module", "flag", "names"),
    [
        ("torchx_apps.export", "--store", ROW_FORMATS),
        ("torchx_apps.embed", "--store", ROW_FORMATS),
        ("torchx_apps.export", "--index", INDEX_KINDS),
    ],
)
def test_flags_name_every_entry(
    module: str, flag: str, names: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands answer ``--help`` without torch, so their flags list the names a second time."""
    choices: dict[str, Iterator[str]] = {}
    added = argparse.ArgumentParser.add_argument

    def add_argument(
        self: argparse.ArgumentParser, *flags: str, **options: object
    ) -> argparse.Action:
        choices.update(dict.fromkeys(flags, options.get("choices")))  # type: ignore[arg-type]
        return added(self, *flags, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_argument)
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    assert list(choices[flag]) == list(names)
