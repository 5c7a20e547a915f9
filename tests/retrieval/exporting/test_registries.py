"""Each row format and kind of index goes through export, load and search, and the flags of the commands name it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.retrieval.small_bundle import FIRST_ITEM, SmallBundle
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.index_kinds import INDEX_KINDS
from torchrec_ext.retrieval.exporting.content import ExportConfig
from torchrec_ext.retrieval.store.row_formats import ROW_FORMATS, RowFormat

USERS = np.arange(1, 9)


def rankings(bundle: Bundle, k: int = 5) -> list[set[int]]:
    """The ids of the best ``k`` items of some users, by the bundle's index."""
    assert bundle.users is not None
    positions = bundle.index.search(bundle.embed_query(bundle.users.rows(bundle.users.ids.positions(USERS))), k)[1]
    return [set(bundle.store.ids.ids(row).tolist()) for row in positions.numpy()]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[set[int]]:
    return rankings(SmallBundle(tmp_path_factory.mktemp("exact") / "bundle", interaction="dot").bundle)


@pytest.mark.parametrize("dtype", ROW_FORMATS)
def test_every_row_format_is_exported_and_searched(dtype: str, tmp_path: Path, exact: list[set[int]]) -> None:
    bundle = SmallBundle(tmp_path / "bundle", interaction="dot", store=dtype).bundle
    assert (bundle.store.dtype, bundle.manifest.content["store"]["dtype"]) == (dtype, dtype)
    same = sum(len(found & best) for found, best in zip(rankings(bundle), exact, strict=True))
    assert same == 40 if ROW_FORMATS[dtype].exact else same >= 36


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_every_kind_of_index_is_exported_and_searched(kind: str, tmp_path: Path, exact: list[set[int]]) -> None:
    if kind != "exact":
        pytest.importorskip("faiss", reason="the package faiss-cpu is not installed (extra `retrieval`)")
    bundle = SmallBundle(tmp_path / "bundle", interaction="dot", index=kind, recall=0.9).bundle
    assert bundle.manifest.content["index"]["kind"] == kind
    assert bundle.manifest.recall >= 0.9
    same = sum(len(found & best) for found, best in zip(rankings(bundle), exact, strict=True))
    assert same == 40 if bundle.manifest.recall == 1 else same >= 36


class BrainFloats(RowFormat):
    """A format of a user's own: one class, one line in the registry."""

    name = "bf16"
    numbers = torch.bfloat16

    def rounding(self, greatest: float) -> float:
        return greatest * 2**-8


def test_a_new_row_format_is_one_class_and_one_line(
    tmp_path: Path, exact: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="store='bf16': must be one of fp32, fp16, int8"):
        ExportConfig(store="bf16")
    monkeypatch.setitem(ROW_FORMATS, "bf16", BrainFloats())
    bundle = SmallBundle(tmp_path / "bundle", interaction="dot", store="bf16").bundle
    assert bundle.store.matrix().dtype == torch.bfloat16
    assert bundle.store.ids.ids([0]).tolist() == [FIRST_ITEM]
    assert sum(len(found & best) for found, best in zip(rankings(bundle), exact, strict=True)) >= 32


@pytest.mark.parametrize(
    ("module", "flag", "names"),
    [
        ("torchx_apps.export", "--store", ROW_FORMATS),
        ("torchx_apps.embed", "--store", ROW_FORMATS),
        ("torchx_apps.export", "--index", INDEX_KINDS),
    ],
)
def test_flags_name_every_entry(module: str, flag: str, names: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands answer ``--help`` without torch, so their flags list the names a second time."""
    choices: dict[str, Iterator[str]] = {}
    added = argparse.ArgumentParser.add_argument

    def add_argument(self: argparse.ArgumentParser, *flags: str, **options: object) -> argparse.Action:
        choices.update(dict.fromkeys(flags, options.get("choices")))  # type: ignore[arg-type]
        return added(self, *flags, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_argument)
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    assert list(choices[flag]) == list(names)
