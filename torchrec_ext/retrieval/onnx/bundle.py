"""A bundle's towers with their tables, and its top NN, as ONNX files that onnxruntime and numpy alone can serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.retrieval import audit as audits
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.onnx import ExportError, export_onnx, export_top, require_onnx, write_onnx
from torchrec_ext.retrieval.onnx_check import NAME, TOP, audited_towers, check_onnx
from torchrec_ext.retrieval.onnx_readme import readme
from torchrec_ext.retrieval.onnx_tower import EXPORTABLE, PaddedTower, example_of, shapes_of
from torchrec_ext.retrieval.store import EmbeddingStore

_EXAMPLES, _BLOCK = 8, 65536
_INLINE = 2**30  # bytes of weights that one file holds; protobuf ends at 2 GiB


def export_bundle(bundle: Bundle, out: Path | str, *, skip: Sequence[str] = (), overwrite: bool = False) -> dict[str, Any]:
    """Writes the towers, the top NN, the candidates' rows and ids, examples, ``onnx.json`` and a README that serves them.

    Every file is compared with the bundle on the audit's rows, many at a time and one by one, before the folder is there.

    Args:
        bundle: that was loaded.
        out: the folder to make; not in the bundle, which would then be refused.
        skip: towers to leave out, and ``top``.
        overwrite: replace an earlier one.

    Returns:
        What ``onnx.json`` says.

    Raises:
        ExportError: a tower or the top NN cannot be exported, or its file answers something else; it is named.
        ValueError: a package is missing, or ``skip`` names none of the bundle's towers.
        DataError: the folder is taken, or cannot be written.
    """
    require_onnx()
    out = Path(out)
    check_exportable({name: own["class"] for name, own in bundle.architecture.towers.items()}, skip)
    if out.resolve().is_relative_to(bundle.folder.resolve()) or bundle.folder.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out}: is the bundle {bundle.folder}, in it, or around it; choose a folder beside it")
    with whole_folder(out, overwrite=overwrite, mark=NAME) as folder:
        said: dict[str, Any] = {"bundle": bundle.manifest.digest, "query_towers": bundle.query, "candidate_tower": bundle.candidate}
        said |= {"skipped": sorted(skip), "towers": _write_towers(bundle, folder, skip)}
        if TOP not in skip:
            said |= _write_top(bundle, folder)
        said["raw_columns"] = {"query": bundle.request_columns, "candidate": bundle.candidate_columns}
        said["preprocessed"] = (bundle.folder / "preprocessor").is_dir()
        (folder / NAME).write_text(json.dumps(said, indent=1) + "\n")
        said["differences"] = check_onnx(bundle, folder)
        _write_examples(bundle, folder, said)
        (folder / NAME).write_text(json.dumps(said, indent=1) + "\n")
        (folder / "README.md").write_text(readme(said))
    return said


def told(said: Mapping[str, Any], out: Path) -> str:
    """What was written, and how far it is from the bundle."""
    parts = ", ".join(f"{name} {apart:.1g}" for name, apart in said["differences"].items())
    left = f"; without {', '.join(said['skipped'])}" if said["skipped"] else ""
    return (
        f"onnx: {out} (on {audits.PAIRS} audit rows it differs from the bundle by at most: {parts}{left})\n"
        f"serve it with numpy and onnxruntime: {out / 'README.md'}"
    )


def check_exportable(towers: Mapping[str, str], skip: Sequence[str] = ()) -> None:
    """Refuses what cannot be exported, before anything is written.

    Args:
        towers: by name the class.
        skip: towers to leave out, and ``top``.

    Raises:
        ExportError: a tower is of a class whose computation is not known here, such as a sequence encoder.
        ValueError: ``skip`` names no tower.
    """
    wrong = [name for name in skip if name not in (*towers, TOP)]
    if wrong:
        raise ValueError(f"skip: {wrong[0]!r} is none of {', '.join((*towers, TOP))}")
    for name, kind in towers.items():
        if name not in skip and kind not in EXPORTABLE:
            raise ExportError(
                f"tower '{name}': a {kind} cannot be exported to ONNX, which is written for towers of pooled tables "
                f"({', '.join(EXPORTABLE)}); leave it out by name (--onnx-skip {name}), and take its vectors from the bundle"
            )


def _write_towers(bundle: Bundle, folder: Path, skip: Sequence[str]) -> dict[str, Any]:
    said = {}
    (folder / "towers").mkdir()
    names = [(side, name) for side in bundle.sides for name in side.model.towers]
    for number, (side, name) in enumerate(names):
        if name in skip:
            continue
        tower = PaddedTower(side, name)
        file = f"towers/{name if name.isidentifier() else f'{number:03}'}.onnx"
        size = sum(value.numel() * value.element_size() for value in tower.parameters())
        given = (tower, example_of(tower.inputs), shapes_of(tower.inputs), folder / file)
        _named(f"tower '{name}'", partial(write_onnx, *given, external=size > _INLINE))
        said[name] = {
            "file": file,
            "inputs": [vars(each) for each in tower.inputs],
            "output": _value("output", ["B", tower.out_features], f"what tower '{name}' makes of B rows"),
        }
    return said


def _write_top(bundle: Bundle, folder: Path) -> dict[str, Any]:
    projection, width = bundle.projection, bundle.query_width
    towers: Any = bundle.sides[0].model.towers.values()
    widths = [int(tower.out_features) for tower in towers]
    candidate = bundle.sides[1].width
    rows = {"query": {"towers": torch.randn(4, width)}, "candidates": {"tower": torch.randn(4, candidate)}}
    for part, example in rows.items():
        _named(TOP, partial(export_onnx, _Part(projection, part), example, folder / f"{part}.onnx"))
    _named(TOP, partial(export_top, projection, folder / "top.onnx", query_widths=widths))
    ids = _write_rows(bundle.projected, folder)
    stored = bundle.projected
    query = projection.query_width or width
    return {
        "query": _file(
            "query.onnx", [_value("towers", ["B", width], f"outputs of {', '.join(bundle.query)} side by side")], ["B", query]
        ),
        "candidates": _file(
            "candidates.onnx", [_value("tower", ["N", candidate], f"outputs of {bundle.candidate}")], ["N", projection.width]
        ),
        TOP: _file(
            "top.onnx",
            [
                _value("query", [query], "one row of query.onnx"),
                _value("candidates", ["N", projection.width], "rows of candidates.npy, or of candidates.onnx"),
            ],
            ["N"],
        ),
        "arrays": {
            "candidates.npy": _value("candidates", ["I", projection.width], f"stored rows of the catalogue, from {stored.dtype}"),
            "ids.npy": {**_value("ids", ["I"], "what the items are called"), "dtype": "int64" if ids.dtype.kind == "i" else "str"},
        },
    }


def _write_rows(stored: EmbeddingStore, folder: Path) -> NDArray[Any]:
    """The catalogue's rows and ids as plain arrays; returns the ids."""
    shape = (len(stored), stored.width)
    rows = np.lib.format.open_memmap(folder / "candidates.npy", mode="w+", dtype=np.float32, shape=shape)
    for start in range(0, len(stored), _BLOCK):
        rows[start : start + _BLOCK] = stored.block(start, start + _BLOCK).numpy()
    rows.flush()
    ids = stored.ids.ids()
    ids = ids.astype(str) if ids.dtype == object else ids
    np.save(folder / "ids.npy", ids, allow_pickle=False)
    return ids


class _Part(nn.Module):
    """What a projection makes of one side alone."""

    def __init__(self, projection: nn.Module, method: str) -> None:
        super().__init__()
        self.projection, self._method = projection, method
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        return getattr(self.projection, self._method)(rows).clone()  # type: ignore[no-any-return]


def _write_examples(bundle: Bundle, folder: Path, said: Mapping[str, Any]) -> None:
    """``TOWER.INPUT`` and ``TOWER.output`` of the first rows of the audit, and the ``logits`` of these pairs."""
    pairs, logits = audits.Audit.open(bundle.folder)
    arrays: dict[str, Any] = {"logits": logits[:_EXAMPLES].numpy()}
    for side, name, read in audited_towers(bundle, pairs):
        if name in said["towers"]:
            columns = PaddedTower(side, name).columns(read)
            arrays |= {f"{name}.{column}": value[:_EXAMPLES].numpy() for column, value in columns.items()}
            arrays[f"{name}.output"] = side.outputs(read)[list(side.model.towers).index(name)][:_EXAMPLES].numpy()
    np.savez(folder / "examples.npz", **arrays)


def _named(what: str, export: Callable[[], object]) -> None:
    try:
        export()
    except ExportError as error:
        name = what.removeprefix("tower ").strip("'")
        raise ExportError(f"{what}: {error}; leave it out by name (--onnx-skip {name})") from error


def _value(name: str, shape: Sequence[Any], meaning: str) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": "float32", "meaning": meaning}


def _file(file: str, inputs: list[dict[str, Any]], shape: Sequence[Any]) -> dict[str, Any]:
    return {"file": file, "inputs": inputs, "output": _value("output", shape, "")}
