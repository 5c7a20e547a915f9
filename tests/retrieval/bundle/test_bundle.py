"""A bundle gives the model's logits; none is loaded whose files were changed, cut, renamed, cast or exchanged."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torchrec import EmbeddingBagConfig

from tests.examples import ITEMS, NO_MANIFESTS, USERS
from tests.retrieval.bundles import bundle_of, contents, model_of
from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.modules.interaction import INTERACTIONS
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest, file_digests
from torchrec_ext.retrieval.bundle.request_columns import Columns
from torchrec_ext.retrieval.bundle.tables import Attribute, read_table, write_table
from torchrec_ext.retrieval.exporting.content import Catalogue
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.versions import StoreError
from torchrec_ext.retrieval.store.writer import write_store
from torchrec_ext.schema import BatchSchema, DataError, Jagged
from torchrec_ext.sealed import measure_file

ROWS = {"user_id": [5, 99], "history": [[3, 4], []], "age": [0.5, 0.25]}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    export(model_of(), folder, **contents())
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of another model of the same architecture, over the same catalogue."""
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    export(model_of(seed=1), folder, **contents())
    return folder


@pytest.fixture(scope="module")
def bundle(pristine: Path) -> Bundle:
    return Bundle.load(pristine)


def logits_of_the_model(
    rows: dict[str, list[Any]], items: list[int], prices: list[float]
) -> torch.Tensor:
    model = model_of().eval()
    lengths = torch.tensor([len(history) for history in rows["history"]])
    history = torch.tensor(
        [item for each in rows["history"] for item in each], dtype=torch.int64
    )
    ids = {
        "user_id": Jagged(torch.tensor(rows["user_id"])),
        "history": Jagged(history, lengths),
        "item_id": Jagged(torch.tensor(items)),
    }
    dense = {"age": torch.tensor(rows["age"]), "price": torch.tensor(prices)}
    with torch.no_grad():
        return model.logits(
            model.schema().assemble(ids, dense, labels=torch.zeros(len(items)))
        )


def test_towers_and_top_nn_of_the_bundle_give_the_logits_of_the_model(
    bundle: Bundle,
) -> None:
    query = bundle.embed_query(ROWS)
    candidates = bundle.embed_candidates({"item_id": [7, 8], "price": [0.5, 0.75]})
    expected = logits_of_the_model(ROWS, [7, 8], [0.5, 0.75])
    torch.testing.assert_close(
        bundle.interaction([query, candidates]), expected, rtol=0, atol=1e-6
    )
    assert bundle.manifest.parity["greatest_difference"] <= 1e-6
    assert bundle.manifest.content["coverage"] == {
        "items": ITEMS - 1,
        "trained": ITEMS - 1,
        "missing": 0,
    }


def test_the_store_holds_what_the_candidate_tower_makes_of_the_catalogue(
    bundle: Bundle,
) -> None:
    features = contents()["catalogue"].features.to_pydict()
    torch.testing.assert_close(
        bundle.store.rows(torch.arange(ITEMS - 1)),
        bundle.embed_candidates(features),
        rtol=0,
        atol=1e-7,
    )
    assert bundle.store.ids.positions([1, ITEMS - 1, ITEMS]).tolist() == [
        0,
        ITEMS - 2,
        -1,
    ]


@pytest.mark.parametrize(
    ("interaction", "metric"),
    [(name, kind.metric or "top_nn") for name, kind in INTERACTIONS.items()],
)
def test_the_metric_is_that_of_the_loss(
    interaction: Any, metric: str, tmp_path: Path
) -> None:
    bundle = bundle_of(tmp_path / "bundle", interaction)
    assert (bundle.metric, bundle.index.metric) == (metric, metric)
    query = bundle.embed_query(ROWS)
    _, found = bundle.index.search(query, 5)
    candidates = bundle.store.rows(torch.arange(ITEMS - 1))
    expected = bundle.interaction.score_all(query, candidates).topk(5).indices  # type: ignore[operator]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("store", ["fp16", "int8"])
def test_a_narrow_store_says_what_it_lost(store: Any, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "bundle", store=store)
    assert bundle.store.dtype == store
    assert 0 < bundle.manifest.content["audit"]["store_difference"] < 0.05


# -- parts that do not belong: each mutation of a bundle's folder, and the words by which loading refuses it


def cut(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path, name: str, at: int = -2) -> None:
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 0x01
    (folder / name).write_bytes(bytes(data))


def rename(folder: Path, name: str, to: str) -> None:
    (folder / name).rename(folder / to)


def change(folder: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    whole = json.loads((folder / name).read_text())
    edit(whole)
    (folder / name).write_text(json.dumps(whole))


def version(folder: Path) -> str:
    return EmbeddingStore.open(folder / "store").version


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "table dropped": (
        lambda b: (b / "tables/001.safetensors").unlink(),
        r"tables/001\.safetensors: the manifest lists it.*missing",
    ),
    "table cut": (
        lambda b: cut(b, "tables/000.safetensors"),
        r"tables/000\.safetensors: .* bytes.*cut or changed",
    ),
    "table, one bit": (
        lambda b: flip(b, "tables/000.safetensors"),
        r"tables/000\.safetensors: does not have the SHA-256",
    ),
    "tables swapped": (
        lambda b: (
            rename(b, "tables/000.safetensors", "x"),
            rename(b, "tables/002.safetensors", "tables/000.safetensors"),
        ),
        r"tables/002\.safetensors: the manifest lists it.*'x' is there.*renamed",
    ),
    "tower dropped": (
        lambda b: (b / "towers/000.safetensors").unlink(),
        r"towers/000\.safetensors: .*missing",
    ),
    "tower, one bit": (
        lambda b: flip(b, "towers/001.safetensors"),
        r"towers/001\.safetensors: does not have the SHA-256",
    ),
    "top NN cut": (
        lambda b: cut(b, "interaction.safetensors"),
        r"interaction\.safetensors: .* bytes",
    ),
    "top NN, one bit": (
        lambda b: flip(b, "interaction.safetensors"),
        r"interaction\.safetensors: does not have",
    ),
    "architecture changed": (
        lambda b: flip(b, "architecture.json", 40),
        r"architecture\.json: does not have",
    ),
    "store dropped": (lambda b: shutil.rmtree(b / "store"), r"store/.*missing"),
    "store cut": (
        lambda b: cut(b, f"store/{version(b)}/rows.bin"),
        r"rows\.bin: .* bytes",
    ),
    "store, one bit": (
        lambda b: flip(b, f"store/{version(b)}/rows.bin"),
        r"rows\.bin: does not have the SHA-256",
    ),
    "store refreshed behind its back": (
        lambda b: write_store(
            b / "store", [(np.arange(1, ITEMS), np.zeros((ITEMS - 1, 8)))]
        ),
        r"store/.*(is not in the manifest|bytes|SHA-256)",
    ),
    "titles, one bit": (
        lambda b: flip(b, "items.arrow", 500),
        r"items\.arrow: does not have",
    ),
    "users dropped": (lambda b: shutil.rmtree(b / "users"), r"users/.*missing"),
    "users' ids cut": (
        lambda b: cut(b, "users/ids_ids.npy"),
        r"ids_ids\.npy: .* bytes",
    ),
    "audit dropped": (lambda b: shutil.rmtree(b / "audit"), r"audit/.*missing"),
    "a file too many": (
        lambda b: (b / "notes.txt").write_text("x"),
        r"notes\.txt: is not in the manifest",
    ),
    "a link": (
        lambda b: (b / "tables/003.safetensors").symlink_to("/etc/hostname"),
        r"is a link",
    ),
    "manifest: another metric": (
        lambda b: change(
            b, "manifest.json", lambda m: m["content"].update(metric="dot")
        ),
        r"manifest\.json: its content does not have its digest",
    ),
    "manifest: better parity": (
        lambda b: change(
            b,
            "manifest.json",
            lambda m: m["certificate"]["parity"].update(greatest_difference=0),
        ),
        r"manifest\.json: its certificate does not have its seal",
    ),
    "manifest: another format": (
        lambda b: change(b, "manifest.json", lambda m: m.update(format=99)),
        r"format 99.*reads 1",
    ),
    "manifest: not JSON": (
        lambda b: (b / "manifest.json").write_text("{"),
        r"manifest\.json: is not a JSON file",
    ),
    "manifest: of a checkpoint": (
        lambda b: (b / "manifest.json").write_text(
            '{"format": 1, "content": {}, "files": {}}'
        ),
        r"belongs to something other than a bundle, such as a checkpoint",
    ),
    "manifest: a list": (
        lambda b: (b / "manifest.json").write_text("[]"),
        r"holds no JSON object",
    ),
    "manifest dropped": (
        lambda b: (b / "manifest.json").unlink(),
        r"manifest\.json: cannot be read.*is '.*' a bundle",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_is_not_as_it_was_written_is_refused(
    name: str, pristine: Path, tmp_path: Path
) -> None:
    mutate, message = FILES[name]
    folder = shutil.copytree(pristine, tmp_path / "bundle", symlinks=True)
    Bundle.load(folder)
    mutate(folder)
    with pytest.raises(BundleError, match=message):
        Bundle.load(folder)


def sealed(folder: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Makes the manifest fit the files again, as one would who swaps parts and knows the format."""
    manifest = Manifest.open(folder)
    content = json.loads(json.dumps(manifest.content))
    content["files"] = file_digests(folder)
    if (folder / "store").exists():
        store = EmbeddingStore.open(folder / "store")
        content["store"] = {
            "digest": store.digest,
            "dtype": store.dtype,
            "width": store.width,
            "tower": store.tower,
        }
        content["index"]["store"] = store.digest
    if edit is not None:
        edit(content)
    Manifest(content=content, certificate=manifest.certificate).save(folder)


def store_with(
    folder: Path,
    change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    **options: Any,
) -> None:
    """The store written again with other ids or vectors, under the same tower's name."""
    store = EmbeddingStore.open(folder / "store")
    ids, vectors = change(store.ids.ids(), store.rows(torch.arange(len(store))).numpy())
    tower = options.pop("tower", store.tower)
    shutil.rmtree(folder / "store")
    write_store(folder / "store", [(ids, vectors)], tower=tower, **options)


def stretch(folder: Path, name: str) -> None:
    save_file(
        {key: value * 1.01 for key, value in load_file(folder / name).items()},
        folder / name,
    )


def other_tables(folder: Path, name: str, edit: Callable[[pa.Table], pa.Table]) -> None:
    table = edit(read_table(folder / name))
    write_table(folder / f"{name}.new", table)
    (folder / f"{name}.new").replace(folder / name)


SWAPS: dict[
    str,
    tuple[Callable[[Path, Path], Any], Callable[[dict[str, Any]], None] | None, str],
] = {
    "the store of another model": (
        lambda b, s: (
            shutil.rmtree(b / "store"),
            shutil.copytree(s / "store", b / "store"),
        ),
        None,
        r"store: was made by tower .* another model or preprocessing",
    ),
    "the same under this tower's name": (
        lambda b, s: store_with(
            b,
            lambda ids, v: (
                ids,
                EmbeddingStore.open(s / "store").rows(torch.arange(ITEMS - 1)).numpy(),
            ),
        ),
        None,
        r"store: the vectors of 256 audited items differ",
    ),
    "ids shifted by one": (
        lambda b, s: store_with(b, lambda ids, v: (ids + 1, v)),
        None,
        r"store: item \d+ is at position",
    ),
    "vectors shifted by one": (
        lambda b, s: store_with(b, lambda ids, v: (ids, np.roll(v, 1, axis=0))),
        None,
        r"store: the vectors of 256 audited items differ",
    ),
    "cast to fp16": (
        lambda b, s: store_with(b, lambda ids, v: (ids, v), dtype="fp16"),
        lambda content: content["store"].update(dtype="fp32"),
        r"store: dtype fp16, this bundle needs fp32",
    ),
    "a smaller catalogue": (
        lambda b, s: store_with(b, lambda ids, v: (ids[:-1], v[:-1])),
        None,
        r"different catalogues",
    ),
    "narrower vectors": (
        lambda b, s: store_with(b, lambda ids, v: (ids, v[:, :4])),
        None,
        r"store: width 4, this bundle needs 8",
    ),
    "the towers of another model": (
        lambda b, s: shutil.copyfile(
            s / "towers/000.safetensors", b / "towers/000.safetensors"
        ),
        None,
        r"the query tower is not that of the manifest",
    ),
    "the candidate tower of another model": (
        lambda b, s: shutil.copyfile(
            s / "towers/001.safetensors", b / "towers/001.safetensors"
        ),
        None,
        r"the candidate tower is not that of the manifest",
    ),
    "the top NN of another model": (
        lambda b, s: shutil.copyfile(
            s / "interaction.safetensors", b / "interaction.safetensors"
        ),
        None,
        r"(the audit batch: 256 logits differ|projected: was made by)",
    ),
    "an index of another metric": (
        lambda b, s: None,
        lambda c: c["index"].update(metric="dot"),
        r"of metric dot over store",
    ),
    "an index over another store": (
        lambda b, s: None,
        lambda c: c["index"].update(store="0" * 64),
        r"of metric top_nn over store 000000",
    ),
    "another metric": (
        lambda b, s: None,
        lambda c: c.update(metric="dot"),
        r"the manifest names .* metric dot",
    ),
    "another candidate": (
        lambda b, s: None,
        lambda c: c.update(candidate="user"),
        r"the manifest names the towers",
    ),
    "a table of another type": (
        lambda b, s: save_file(
            {"weight": load_file(b / "tables/000.safetensors")["weight"].half()},
            b / "tables/000.safetensors",
        ),
        lambda c: c.update(towers=c["towers"]),
        r"(is not that of the manifest|or was cast)",
    ),
    "users of another export": (
        lambda b, s: other_tables(
            b, "users/features.arrow", lambda table: table.slice(0, 10)
        ),
        None,
        r"users: .* they are of different exports",
    ),
    "titles of another catalogue": (
        lambda b, s: other_tables(b, "items.arrow", lambda table: table.slice(0, 10)),
        None,
        r"parts of different catalogues",
    ),
    "the audit of another model": (
        lambda b, s: (
            shutil.rmtree(b / "audit"),
            shutil.copytree(s / "audit", b / "audit"),
        ),
        None,
        r"the audit batch: 256 logits differ",
    ),
    "raw columns of other types": (
        lambda b, s: change(
            b, "architecture.json", lambda a: a["types"].update(age="int64")
        ),
        None,
        r"the query tower is not that of the manifest",
    ),
    "another row for unknown ids": (
        lambda b, s: change(
            b, "architecture.json", lambda a: a.update(oov_ids={"user_id": 3})
        ),
        None,
        r"is not that of the manifest",
    ),
    "a tower fewer": (
        lambda b, s: change(
            b, "architecture.json", lambda a: a.update(towers=a["towers"][:1])
        ),
        None,
        r"does not describe two towers",
    ),
    "a manifest without files": (
        lambda b, s: None,
        lambda c: c.pop("files"),
        r"the manifest lacks 'files'",
    ),
}


@pytest.mark.parametrize("name", SWAPS)
def test_parts_that_do_not_belong_together_are_refused_though_every_digest_fits(
    name: str, pristine: Path, stranger: Path, tmp_path: Path
) -> None:
    mutate, edit, message = SWAPS[name]
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    mutate(folder, stranger)
    sealed(folder, edit)
    with pytest.raises(BundleError, match=message):
        Bundle.load(folder)


def values_of(folder: Path, name: str, edit: Callable[[np.ndarray], Any]) -> None:
    """Changes a file of the current version of a store, or of the users, under digests that fit."""
    at = (
        EmbeddingStore.open(folder / name.split("/")[0]).folder
        if name.startswith("store")
        else folder / "users"
    )
    path = at / name.split("/")[1]
    if path.suffix == ".npy":
        array = np.load(path)
        edit(array)
        np.save(path, array)
    else:
        array = np.fromfile(path, np.float32)
        edit(array)
        array.tofile(path)
    if at.name == "users":
        return
    listed = json.loads((at / "manifest.json").read_text())
    del listed["digest"]
    listed["files"] = {known: measure_file(at / known) for known in listed["files"]}
    whole = json.dumps(listed, sort_keys=True)
    (at / "manifest.json").write_text(
        json.dumps({**listed, "digest": hashlib.sha256(whole.encode()).hexdigest()})
    )


def lists(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    columns = table.to_pydict()
    columns[name][row] = value
    return pa.table(
        {
            key: pa.array(column, table.schema.field(key).type)
            for key, column in columns.items()
        }
    )


def swapped(array: np.ndarray) -> None:
    array[[3, 4]] = array[[4, 3]]


VALUES: dict[
    str, tuple[Callable[[Path], Any], Callable[[dict[str, Any]], None] | None, str]
] = {
    "a vector of NaN": (
        lambda b: values_of(
            b, "store/rows.bin", lambda rows: rows.__setitem__(-1, np.nan)
        ),
        None,
        rf"store: the vector of item {ITEMS - 1} \(row {ITEMS - 2}\) holds NaN or infinity",
    ),
    "a tower's weight of infinity": (
        lambda b: save_file(
            {
                key: value.index_fill(0, torch.tensor([0]), torch.inf)
                for key, value in load_file(b / "interaction.safetensors").items()
            },
            b / "interaction.safetensors",
        ),
        None,
        r"(weight '.*', row 0: holds NaN or infinity|projected: was made by tower)",
    ),
    "an item taken by a user beyond the catalogue": (
        lambda b: other_tables(
            b,
            "users/items.arrow",
            lambda table: lists(table, "seen", 3, [2, ITEMS - 1]),
        ),
        None,
        rf"users: column 'seen', users 0 to {USERS - 2}: positions \d+ to {ITEMS - 1} and 0 nulls; must be 0 to "
        rf"{ITEMS - 2}",
    ),
    "an item liked at -1": (
        lambda b: other_tables(
            b, "users/items.arrow", lambda table: lists(table, "liked", 3, [-1])
        ),
        None,
        r"users: column 'liked', .*: positions -1 to",
    ),
    "positions of another type": (
        lambda b: other_tables(
            b,
            "users/items.arrow",
            lambda t: t.set_column(0, "seen", t["seen"].cast(pa.list_(pa.float64()))),
        ),
        None,
        r"users/items\.arrow: column 'seen' is list<.*double>, must be lists of positions",
    ),
    "a user's number of NaN": (
        lambda b: other_tables(
            b,
            "users/features.arrow",
            lambda table: lists(table, "age", 3, float("nan")),
        ),
        None,
        r"users: user 4 \(row 3\): column 'age', row 0: value nan is not finite; .*a request for such a user would be "
        r"refused",
    ),
    "a user's number that is null": (
        lambda b: other_tables(
            b, "users/features.arrow", lambda table: lists(table, "age", 5, None)
        ),
        None,
        r"users: user 6 \(row 5\): column 'age', row 0: there is no value",
    ),
    "what is known of nobody is infinite": (
        lambda b: other_tables(
            b,
            "users/features.arrow",
            lambda table: lists(table, "age", len(table) - 1, float("inf")),
        ),
        None,
        r"users: the user of whom nothing is known: column 'age'",
    ),
    "ids of items that do not ascend": (
        lambda b: values_of(b, "store/ids_ids.npy", swapped),
        None,
        r"store: ids: entry 4 of the sorted ones is not greater than the one before it",
    ),
    "two users of one id": (
        lambda b: values_of(
            b, "users/ids_ids.npy", lambda ids: ids.__setitem__(3, ids[4])
        ),
        None,
        r"users: ids: entry 4 of the sorted ones is not greater",
    ),
    "ids of another type": (
        lambda b: np.save(
            b / "users/ids_ids.npy", np.load(b / "users/ids_ids.npy").astype(np.float64)
        ),
        None,
        r"id map in '.*users' cannot be read \(its arrays are \{'ids': dtype\('float64'\)\}",
    ),
    "nothing is live": (
        lambda b: values_of(b, "store/live.npy", lambda live: live.fill(False)),
        None,
        rf"store: live\.npy says of none of its {ITEMS - 1} items that it is live",
    ),
    "a tolerance of its own": (
        lambda b: store_with(b, lambda ids, v: (ids, np.roll(v, 1, axis=0))),
        lambda content: content["audit"].update(store_difference=1e30),
        r"store: its manifest says that fp32 lost 1e\+30 of a number, where rounding loses 0 at most",
    ),
    "a tolerance that is no number": (
        lambda b: None,
        lambda content: content["audit"].update(store_difference="nan"),
        r"store: its manifest says that fp32 lost nan",
    ),
    "an audit of nothing": (
        lambda b: [
            other_tables(b, f"audit/{name}.arrow", lambda table: table.slice(0, 0))
            for name in ("queries", "candidates", "expected")
        ],
        None,
        r"audit: has no pairs",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_cannot_be_served_is_refused_though_every_digest_fits(
    name: str, pristine: Path, tmp_path: Path
) -> None:
    mutate, edit, message = VALUES[name]
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    mutate(folder)
    sealed(folder, edit)
    with pytest.raises(BundleError, match=message):
        Bundle.load(folder)


def test_towers_that_were_changed_under_a_new_name_fail_the_audit(
    pristine: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    stretch(folder, "towers/000.safetensors")
    digest = Bundle.query_digest.func  # type: ignore[attr-defined]

    def with_new_digest(content: dict[str, Any]) -> None:
        seen = Bundle.__new__(Bundle)
        from torchrec_ext.retrieval.bundle.encoder import Architecture

        seen.architecture = Architecture.open(folder)
        seen.manifest = Manifest(content=content, certificate={})
        seen.query = seen.architecture.query
        content["towers"]["query"] = digest(seen)

    sealed(folder, with_new_digest)
    with pytest.raises(
        BundleError,
        match=r"the audit batch: 256 logits differ by up to .*its towers are not those that were proven",
    ):
        Bundle.load(folder)
    Bundle.load(folder, verify=False)  # which promises less


# -- files of a stranger


class Boom:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('code was run')",))


CRAFTED: dict[str, tuple[str, bytes]] = {
    "a pickle for a table": ("tables/000.safetensors", pickle.dumps(Boom())),
    "a header longer than the file": (
        "tables/000.safetensors",
        (2**62).to_bytes(8, "little") + b"{}",
    ),
    "a tensor beyond the file": (
        "tables/000.safetensors",
        (64).to_bytes(8, "little")
        + json.dumps(
            {
                "weight": {
                    "dtype": "F32",
                    "shape": [10**6, 10],
                    "data_offsets": [0, 4 * 10**7],
                }
            }
        )
        .encode()[:64]
        .ljust(64),
    ),
    "a pickle for a tower": ("towers/000.safetensors", pickle.dumps(Boom())),
    "no Arrow file": ("items.arrow", b"ARROW1\0\0" + b"\xff" * 64),
    "a pickle for users": ("users/features.arrow", pickle.dumps(Boom())),
    "an npy file of objects": ("users/ids_ids.npy", b""),
    "JSON nested 100,000 deep": ("architecture.json", b"[" * 100_000),
    "an architecture of imports": (
        "architecture.json",
        json.dumps(
            {
                "towers": [
                    ["user", {"class": "os.system", "arguments": {"tables": []}}],
                    ["item", {"class": "x", "arguments": {"tables": []}}],
                ],
                "interaction": {},
                "metric": "dot",
                "tables": {},
                "oov_ids": {},
                "types": {},
            }
        ).encode(),
    ),
    "tables outside of the folder": ("architecture.json", b""),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_refused_and_runs_no_code(
    name: str, pristine: Path, tmp_path: Path
) -> None:
    file, data = CRAFTED[name]
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    if name == "an npy file of objects":
        np.save(folder / file, np.array([Boom()], dtype=object), allow_pickle=True)
    elif name == "tables outside of the folder":
        change(
            folder,
            file,
            lambda a: a.update(
                tables=dict.fromkeys(a["tables"], "../../elsewhere.safetensors")
            ),
        )
    else:
        (folder / file).write_bytes(data)
    sealed(folder)
    with pytest.raises(BundleError):
        Bundle.load(folder)
    with pytest.raises(BundleError):
        Bundle.load(folder, verify=False)


@pytest.mark.parametrize("name", NO_MANIFESTS)
def test_a_manifest_that_is_no_plain_file_of_some_size_is_refused_at_once(
    name: str, pristine: Path, tmp_path: Path
) -> None:
    make, message = NO_MANIFESTS[name]
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    (folder / "manifest.json").unlink()
    make(folder / "manifest.json")
    with pytest.raises(
        BundleError, match=rf"bundle/manifest\.json: cannot be read \(.*({message})"
    ):
        Bundle.load(folder)
    shutil.copytree(pristine / "store", tmp_path / "store")
    place = EmbeddingStore.open(tmp_path / "store").folder / "manifest.json"
    place.unlink()
    make(place)
    with pytest.raises(StoreError, match=rf"manifest\.json' is damaged .*({message})"):
        EmbeddingStore.open(tmp_path / "store")


@pytest.mark.slow
def test_it_loads_without_a_process_group_and_without_faiss(pristine: Path) -> None:
    program = f"""
import sys
sys.modules["faiss"] = None  # importing it fails
import torch, torch.distributed as dist
from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.retrieval.bundle.bundle import Bundle
bundle = Bundle.load({str(pristine)!r})
assert not dist.is_initialized()
print(bundle.embed_query({ROWS!r}).shape[1], bundle.manifest.digest)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.split() == ["8", Manifest.open(pristine).digest], done.stderr


def test_tables_are_mapped_and_not_copied(bundle: Bundle) -> None:
    with open("/proc/self/maps") as maps:
        assert str(bundle.folder / "tables/000.safetensors") in maps.read()


# -- cold start and bad input


def test_what_was_never_seen_takes_the_out_of_vocabulary_row_and_is_named(
    bundle: Bundle,
) -> None:
    rows = {
        "user_id": [5, USERS + 7, -3],
        "history": [[3], [4, 10**9], []],
        "age": [0.0, 0.0, 0.0],
    }
    assert {name: found.tolist() for name, found in bundle.unknown(rows).items()} == {
        "user_id": [False, True, True],
        "history": [False, True, False],
    }
    known = bundle.embed_query(
        {"user_id": [0, 0], "history": [[4, 0], []], "age": [0.0, 0.0]}
    )
    torch.testing.assert_close(bundle.embed_query(rows)[1:], known, rtol=0, atol=1e-7)
    expected = bundle.embed_candidates({"item_id": [0], "price": [0.0]})[0]
    torch.testing.assert_close(bundle.unknown_candidate, expected, rtol=0, atol=1e-7)


def test_a_row_that_no_training_row_has_read_is_unknown_too() -> None:
    tables = [
        EmbeddingBagConfig(
            name="items",
            feature_names=["item", "liked"],
            num_embeddings=6,
            embedding_dim=4,
        )
    ]
    columns = Columns(
        BatchSchema.from_tables(tables, oov_ids={"item": 4}),
        {"item": "int64", "liked": "list<int64>"},
        unseen={"item": [2, 5], "liked": [3]},
    )
    # The second list is padded with its out-of-vocabulary row.
    read = columns.read({"item": [2, 1, 9], "liked": [[3, 1], [2, 0], []]})
    assert read.sparse["item"].values.tolist() == [4, 1, 4]
    assert read.sparse["liked"].values.tolist() == [0, 1, 2, 0]
    assert {name: mask.tolist() for name, mask in read.unknown.items()} == {
        "item": [True, False, True],
        "liked": [True, False, False],
    }


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    "is_kept", [False, True], ids=["raw", "kept by a preprocessor"]
)
def test_a_row_of_plain_numbers_is_read_as_any_other(
    monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """Or not by the short way at all: unknown ids, other types and wrong values give the same result or error."""
    tables = [
        EmbeddingBagConfig(
            name="items",
            feature_names=["item", "liked"],
            num_embeddings=6,
            embedding_dim=4,
        ),
        EmbeddingBagConfig(
            name="shops", feature_names=["shop"], num_embeddings=9, embedding_dim=4
        ),
    ]
    schema = BatchSchema.from_tables(
        tables, dense=["age", "price"], oov_ids={"item": 4}
    )
    types = {
        "item": "int64",
        "liked": "list<int64>",
        "shop": "int64",
        "age": "float32",
        "price": "float64",
    }
    preprocessor = (
        FittedPreprocessor(steps=(), keep=tuple(types), raw=types, states=())
        if is_kept
        else None
    )
    columns = Columns(
        schema,
        types,
        preprocessor,
        unseen={"item": [2, 5], "liked": [3]},
        strict=["shop"],
    )
    assert columns._is_plain
    plain = {"item": 1, "liked": [1, 2], "shop": 8, "age": 0.1, "price": 1e10}
    changes: dict[str, list[Any]] = {
        "item": [0, 2, 4, 5, 6, -1, 2**63, True, 1.0, "1", None, [1]],
        "liked": [[], [1], [3], [0, 1], [7], [1, None], [1, True], 1, None, (1, 2)],
        "shop": [0, 9, -1, None],
        "age": [
            1,
            1e300,
            -1e39,
            3.5e38,
            float("nan"),
            float("inf"),
            True,
            None,
            "1",
            [1.0],
        ],
        "price": [2**60 + 1, 1e300, 0.1],
    }
    rows = [
        plain,
        *(
            {**plain, name: value}
            for name, values in changes.items()
            for value in values
        ),
    ]
    short = 0
    for row in rows:
        results: list[Any] = []
        for is_plain in (True, False):
            monkeypatch.setattr(columns, "_is_plain", is_plain)
            try:
                read = columns.read({name: [value] for name, value in row.items()})
            except DataError as error:
                results.append(str(error))
                continue
            bags = {
                name: (bag.values.tolist(), bag.lengths and bag.lengths.tolist())
                for name, bag in read.sparse.items()
            }
            dense = {
                name: (value.dtype, value.tolist())
                for name, value in read.dense.items()
            }
            results.append(
                (
                    bags,
                    dense,
                    {name: mask.tolist() for name, mask in read.unknown.items()},
                    read.size,
                )
            )
        assert results[0] == results[1], row
        short += (
            columns._read_plain({name: [value] for name, value in row.items()})
            is not None
        )
    assert short == 6


def test_users_are_known_by_id_and_nobody_is_known_by_minus_one(bundle: Bundle) -> None:
    users = bundle.users
    assert users is not None
    places = users.ids.positions([4, 10**6])
    rows = users.rows(places)
    assert rows["user_id"] == [4, 0]
    assert rows["history"][1] == []
    assert rows["history"][0] == contents()["users"].features["history"][3].as_py()
    assert users.seen(int(places[0])).tolist() == [4]
    assert users.seen(-1).tolist() == users.liked(-1).tolist() == []
    assert bundle.embed_query(rows).shape == (2, 8)
    with pytest.raises(ValueError, match="rows: 100 is not a user"):
        users.rows([USERS - 1])


def test_titles_and_categories_are_by_position(bundle: Bundle) -> None:
    assert bundle.items.titles_of([0, 3]) == ["Film 1", "Film 4"]
    assert bundle.items.categories == ["drama", "war"]
    categories = bundle.items.attribute("categories")
    assert items_with(categories, ["war"]) == list(range(1, ITEMS - 1, 2))
    assert items_with(categories, ["war", "drama"]) == list(range(ITEMS - 1))
    with pytest.raises(ValueError, match="no item has 'sport'; there are drama, war"):
        categories.bits(["sport"])


def items_with(attribute: Attribute, values: list[Any]) -> list[int]:
    """Positions of the items with one of the values."""
    return np.flatnonzero(
        np.unpackbits(attribute.bits(values), bitorder="little")
    ).tolist()


@pytest.mark.parametrize("distinct", [3, 200, 999])
@pytest.mark.parametrize("as_text", [False, True])
def test_an_attribute_knows_the_items_of_each_value(
    distinct: int, as_text: bool
) -> None:
    """Whether all values are frequent, some, or none; as numbers or texts, alone or in lists, or missing."""
    rng = np.random.default_rng(distinct)
    drawn = [
        sorted(
            {int(value) for value in (distinct * rng.random(rng.integers(0, 4)) ** 3)}
        )
        for _ in range(1_003)
    ]
    lists = [[f"v{value}" for value in each] if as_text else each for each in drawn]
    firsts = [each[0] if each else None for each in lists]
    kind = pa.string() if as_text else pa.int32()
    for column in (pa.array(lists, pa.list_(kind)), pa.array(firsts, kind)):
        attribute = Attribute(pa.chunked_array([column[:400], column[400:]]))
        rows = [
            each if isinstance(each, list) else [each] for each in column.to_pylist()
        ]
        values = attribute.values.ids().tolist()
        assert values == sorted({value for row in rows for value in row} - {None})
        for some in ([value] for value in values[::7]):
            assert items_with(attribute, some) == [
                row for row, own in enumerate(rows) if some[0] in own
            ]
        several = values[1::2]
        assert items_with(attribute, several) == [
            row for row, own in enumerate(rows) if set(own) & set(several)
        ]
    assert items_with(Attribute(pa.chunked_array([pa.nulls(5, kind)])), []) == []


def test_an_attribute_needs_a_free_name_and_values_to_compare(tmp_path: Path) -> None:
    catalogue = contents()["catalogue"]
    for column, message in (
        (
            {"not": [1] * (ITEMS - 1)},
            "catalogue: an attribute cannot have the name 'not'",
        ),
        ({"categories": [1] * (ITEMS - 1)}, "cannot have the name 'categories'"),
        (
            {"price": [0.5] * (ITEMS - 1)},
            "catalogue: attribute 'price' is double, must be whole numbers, text",
        ),
    ):
        changed = replace(catalogue, attributes=pa.table(column))
        with pytest.raises(BundleError, match=message):
            export(
                model_of(), tmp_path / "bundle", **{**contents(), "catalogue": changed}
            )
    with pytest.raises(BundleError, match="catalogue: 1 attributes for"):
        replace(catalogue, attributes=pa.table({"year": [1]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, "column 'age' is missing"),
        ({"age": [0.5, float("nan")]}, "column 'age', row 1"),
        ({"age": [0.5, float("inf")]}, "column 'age', row 1"),
        ({"age": [0.5, "old"]}, "column 'age', row 1: value 'old' is not float32"),
        ({"user_id": ["5", "6"]}, "column 'user_id', row 0: value '5' is not int64"),
        ({"user_id": [1.5, 2]}, "column 'user_id', row 0"),
        ({"user_id": [None, 2]}, "column 'user_id', row 0: there is no value"),
        ({"user_id": 5}, "column 'user_id': 5 is one value"),
        ({"history": [3, 4]}, "column 'history', row 0: value 3 is not list<int64>"),
        ({"history": [[3, None], []]}, "column 'history', row 0: there is no value"),
        ({"age": [0.5]}, "different numbers of rows"),
    ],
)
def test_bad_features_are_named(
    change: dict[str, Any], message: str, bundle: Bundle
) -> None:
    rows = {
        name: value for name, value in {**ROWS, **change}.items() if value is not None
    }
    with pytest.raises(DataError, match=message):
        bundle.embed_query(rows)


# -- exports that must not be


def test_the_audit_is_measured_and_not_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrec_ext.retrieval.bundle.audit import LiveModel

    honest = LiveModel.of_tower
    monkeypatch.setattr(
        LiveModel,
        "of_tower",
        lambda self, name, dense: {
            k: v * 1.001 for k, v in honest(self, name, dense).items()
        },
    )
    with pytest.raises(
        BundleError,
        match="the towers of the bundle and the model that was trained: 256 logits differ by up to",
    ):
        export(model_of(), tmp_path / "bundle", **contents())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_the_earlier_bundle_as_it_was(
    pristine: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    broken = contents()
    ids = broken["catalogue"].ids
    features = pa.table(
        {"item_id": ids, "price": np.full(len(ids), np.nan, np.float32)}
    )
    broken["catalogue"] = Catalogue(ids=ids, features=features)
    with pytest.raises(DataError, match="column 'price'"):
        export(model_of(), folder, overwrite=True, **broken)
    with pytest.raises(DataError, match="there is something already"):
        export(model_of(), folder, **contents())
    assert Bundle.load(folder).manifest.digest == Manifest.open(pristine).digest
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_another_export_replaces_it_whole(
    pristine: Path, stranger: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(pristine, tmp_path / "bundle")
    export(model_of(seed=1), folder, overwrite=True, **contents())
    assert (
        Bundle.load(folder).manifest.digest
        == Manifest.open(stranger).digest
        != Manifest.open(pristine).digest
    )


def test_a_bundle_that_a_killed_export_had_moved_aside_is_found(
    pristine: Path, tmp_path: Path
) -> None:
    shutil.copytree(pristine, tmp_path / ".bundle.old-another-host-17")
    assert (
        Bundle.load(tmp_path / "bundle").manifest.digest
        == Manifest.open(pristine).digest
    )


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_each_file_is_readable_by_whom_the_umask_lets_read(
    umask: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        export(model_of(), tmp_path / "bundle", **contents())
    finally:
        os.umask(before)
    found = {
        path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777
        for path in (tmp_path / "bundle").rglob("*")
    }
    wanted = {
        name: (0o777 if (tmp_path / name).is_dir() else 0o666) & ~umask
        for name in found
    }
    assert found == wanted


def test_every_trained_id_must_be_servable(tmp_path: Path) -> None:
    short = contents(items=ITEMS - 5)
    everything = Catalogue(
        ids=short["catalogue"].ids,
        features=short["catalogue"].features,
        trained=np.arange(1, ITEMS),
    )
    with pytest.raises(
        BundleError,
        match=f"catalogue: 4 ids of the training rows are not in it, {ITEMS - 4} among them",
    ):
        export(model_of(), tmp_path / "bundle", **{**short, "catalogue": everything})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"index": "ivf"}, "index='ivf': searches by dot product or cosine"),
        ({"index": "annoy"}, "index='annoy': must be one of exact"),
        ({"store": "bf16"}, "store='bf16': must be one of fp32"),
        ({"recall": 0.0}, "recall=0.0"),
        (
            {"candidate": "film"},
            "candidate='film': is not a tower of the model; they are user, item",
        ),
        ({"users": None}, "queries: there are no rows to audit by"),
    ],
)
def test_a_wrong_setting_is_told(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=message):
        export(model_of(), tmp_path / "bundle", **{**contents(), **settings})


def test_what_is_no_model_of_towers_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match="a Linear cannot be exported; give a TowerModel"
    ):
        export(torch.nn.Linear(2, 2), tmp_path / "bundle", **contents())


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_an_index_of_faiss_says_its_recall_and_belongs_to_its_store(
    kind: Any, tmp_path: Path
) -> None:
    pytest.importorskip("faiss", reason="needs the extra `retrieval`")
    bundle = bundle_of(tmp_path / "bundle", "dot", index=kind, recall=0.9)
    assert bundle.manifest.recall >= 0.9
    assert bundle.index.metric == "dot"
    found = bundle.index.search(bundle.embed_query(ROWS), 3)[1]
    assert found.shape == (2, 3)
    flip(
        bundle.folder,
        next(
            path.relative_to(bundle.folder).as_posix()
            for path in (bundle.folder / "index").iterdir()
        ),
        30,
    )
    with pytest.raises(BundleError, match="does not have the SHA-256"):
        Bundle.load(bundle.folder)
