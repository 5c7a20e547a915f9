"""A bundle is opened whole or refused in one line, and its audit runs the functions of a request."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, load, numpy_helper, save

from tests.retrieval.small import WIDTH, Small, write_graph
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.columns import Columns
from torchrec_ext.retrieval.manifest import (
    BundleError,
    Manifest,
    bundle_folder,
    file_digests,
    write_manifest,
)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def resealed(folder: Path, **changes: Any) -> None:
    """Writes the manifest of a folder whose files or content somebody changed."""
    manifest = Manifest.open(folder)
    content = {**manifest.content, **changes, "files": file_digests(folder)}
    write_manifest(folder, content, manifest.certificate)


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(folder), "")) <= 200
    return message


def test_a_pointer_that_is_being_written_names_no_bundle_beside_it(
    folder: Path,
) -> None:
    pointer = folder.parent / "pointer"
    pointer.write_text("bundle\n")
    assert bundle_folder(pointer) == folder
    pointer.write_text("")
    with pytest.raises(ValueError, match="there is none in"):
        bundle_folder(pointer)


def test_a_pairs_logit_does_not_depend_on_its_neighbours(folder: Path) -> None:
    bundle = Bundle.load(folder)
    query = bundle.query.embed(Small().users().features)[0]
    every = bundle.pairs(query, bundle.rows)
    for size in (1, 2, 3, 15, 16, 17, 31, 50):
        positions = np.random.default_rng(size).permutation(50)[:size]
        np.testing.assert_array_equal(bundle.logits(query, positions), every[positions])


@pytest.mark.parametrize(
    "name",
    [
        "rows.npy",
        "tables/item.npy",
        "tables/user.npy",
        "query.onnx",
        "candidate.onnx",
        "pairs.onnx",
        "items.arrow",
        "users.arrow",
        "seen.arrow",
        "audit.arrow",
    ],
)
def test_one_changed_byte_is_refused(name: str, copy: Path) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-9] ^= 1
    (copy / name).write_bytes(content)
    assert name in refusal(copy)


@pytest.mark.parametrize("name", ["query.onnx", "pairs.onnx"])
def test_a_changed_number_is_refused_even_if_the_manifest_agrees(
    name: str, copy: Path
) -> None:
    """The audit computes by the graphs that serve, so no manifest can vouch for another network."""
    model = load(copy / name)
    weight = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] = -values.flat[0]
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    save(model, copy / name)
    resealed(copy)
    assert "audited logits differ" in refusal(copy)


def test_changed_rows_are_refused_even_if_the_manifest_agrees(copy: Path) -> None:
    rows = np.load(copy / "rows.npy")
    np.save(copy / "rows.npy", -rows)
    resealed(copy)
    assert "audited logits differ" in refusal(copy)


def test_the_audit_reads_a_row_as_a_request_does(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of single rows that differs from the reader of tables is found, so no bundle fails at its requests."""
    reads = Columns.read_row

    def read(columns: Columns, row: Mapping[str, Any]) -> Any:
        return reads(columns, {**row, "age": row["age"] + 1})

    monkeypatch.setattr(Columns, "read_row", read)
    assert "audited logits differ" in refusal(copy)


def swapped(copy: Path) -> None:
    first, second = copy / "query.onnx", copy / "candidate.onnx"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def other_domain(copy: Path) -> None:
    text = f"""pairs (float[1, {WIDTH}] query) => (float[N] logits) {{
        logits = com.microsoft.Gelu (query)
    }}"""
    write_graph(copy / "pairs.onnx", text, "com.microsoft")
    resealed(copy)


def external(copy: Path) -> None:
    model = load(copy / "query.onnx")
    tensor = model.graph.initializer[-1]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    (copy / "query.onnx").write_bytes(model.SerializeToString())
    resealed(copy)


def cut(copy: Path) -> None:
    path = copy / "rows.npy"
    path.write_bytes(path.read_bytes()[:-4])


def cut_and_resealed(copy: Path) -> None:
    cut(copy)
    resealed(copy)


def other_format(copy: Path) -> None:
    values = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**values, "format": 1}))


def fewer_items(copy: Path) -> None:
    np.save(copy / "rows.npy", np.load(copy / "rows.npy")[:49])
    resealed(copy)


def no_numpy_file(copy: Path) -> None:
    np.save(copy / "rows.npy", np.array([{}], object), allow_pickle=True)
    resealed(copy)


def no_onnx(copy: Path) -> None:
    (copy / "query.onnx").write_bytes(b"\x07" * 100)
    resealed(copy)


def edited(copy: Path) -> None:
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(
        text.replace('"calibrated": true', '"calibrated": false')
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (swapped, "and was written with"),
        (other_domain, "operator domain 'com.microsoft'"),
        (external, "external data"),
        (cut, "and was written with"),
        (cut_and_resealed, "rows.npy"),
        (other_format, "format 1, this package reads"),
        (fewer_items, "has 50 items and 49 rows"),
        (no_numpy_file, "rows.npy"),
        (no_onnx, "ONNX Runtime cannot open it"),
        (edited, "its content does not have its digest"),
        (lambda copy: (copy / "pairs.onnx").unlink(), "pairs.onnx: is missing"),
        (lambda copy: (copy / "more").write_text(""), "is no part of this bundle"),
        (lambda copy: (copy / "manifest.json").unlink(), "cannot be read"),
        (lambda copy: resealed(copy, graphs={}), "the manifest lacks 'query'"),
    ],
)
def test_other_bundles_are_refused(
    change: Callable[[Path], object], what: str, copy: Path
) -> None:
    change(copy)
    assert what in refusal(copy)
