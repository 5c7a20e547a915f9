"""ONNX files beside the bundle that they were written from, on the rows of its audit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval import audit as audits
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.columns import Read
from torchrec_ext.retrieval.manifest import read_json
from torchrec_ext.retrieval.onnx import ExportError, open_onnx
from torchrec_ext.retrieval.onnx_tower import PaddedTower
from torchrec_ext.retrieval.sides import Side

NAME = "onnx.json"
TOP = "top"
# Of an output beside the greatest of the audit, at least 1: another runtime sums in another order.
TOLERANCE = 1e-4
_SINGLE = 8  # rows that are also asked one by one


def check_onnx(bundle: Bundle, folder: Path | str) -> dict[str, float]:
    """Compares the files of a folder with the bundle on the rows of its audit.

    Returns:
        By tower, and ``top``, the greatest difference; that of ``top`` is of logits that the files alone have made.

    Raises:
        ExportError: one is beyond 1e-4; the tower is named.
    """
    folder = Path(folder)
    said = read_json(folder / NAME)
    pairs, logits = audits.Audit.open(bundle.folder)
    found: dict[str, Tensor] = {}
    apart: dict[str, float] = {}
    for side, name, read in audited_towers(bundle, pairs):
        expected = side.outputs(read)[list(side.model.towers).index(name)]
        found[name] = expected
        if name in said["towers"]:
            path = folder / said["towers"][name]["file"]
            found[name], apart[name] = _check_tower(f"tower '{name}'", path, PaddedTower(side, name).columns(read), expected)
    if TOP in said:
        apart[TOP] = _check_top(bundle, folder, said, found, logits)
    return apart


def audited_towers(bundle: Bundle, pairs: audits.Audit) -> list[tuple[Side, str, Read]]:
    """Each tower with its side, and what it reads of the audit."""
    rows = (pairs.queries.to_pydict(), pairs.candidates.to_pydict())
    reads = [side.read(own) for side, own in zip(bundle.sides, rows, strict=True)]
    return [(side, name, read) for side, read in zip(bundle.sides, reads, strict=True) for name in side.model.towers]


def _check_tower(what: str, path: Path, columns: Mapping[str, Tensor], expected: Tensor) -> tuple[Tensor, float]:
    """The file's outputs for all rows, and how far these and those of single rows are from ``expected``."""
    run = open_onnx(path)
    given = {name: value.numpy() for name, value in columns.items()}
    found = run(given)
    singly = [run({name: value[at : at + 1] for name, value in given.items()}) for at in range(_SINGLE)]
    apart = max(_apart(what, path, found, expected), _apart(what, path, np.concatenate(singly), expected[:_SINGLE]))
    return torch.from_numpy(found), apart


def _check_top(bundle: Bundle, folder: Path, said: Mapping[str, Any], found: Mapping[str, Tensor], logits: Tensor) -> float:
    query, candidates, top = (open_onnx(folder / said[name]["file"]) for name in ("query", "candidates", TOP))
    queries = query({"towers": torch.cat([found[name] for name in bundle.query], dim=1).numpy()})
    rows = candidates({"tower": found[bundle.candidate].numpy()})
    pairs = [top({"query": one, "candidates": row[None]}) for one, row in zip(queries, rows, strict=True)]
    apart = _apart(TOP, folder / said[TOP]["file"], np.concatenate(pairs), logits)
    many = top({"query": queries[0], "candidates": rows})
    with torch.inference_mode():
        expected = bundle.projection.score(torch.from_numpy(queries[0]), torch.from_numpy(rows))
    return max(apart, _apart(TOP, folder / said[TOP]["file"], many, expected))


def _apart(what: str, path: Path, found: NDArray[Any], expected: Tensor) -> float:
    if found.shape != tuple(expected.shape):
        raise ExportError(f"{what}: {path.name} answers {found.shape}, the bundle {tuple(expected.shape)}; export it again")
    apart, allowed = audits.difference(torch.from_numpy(found), expected), audits.tolerance(expected, TOLERANCE)
    if not apart <= allowed:
        raise ExportError(
            f"{what}: {path.name} differs from the bundle by up to {apart:.3g} on {len(expected)} audit rows, at most "
            f"{allowed:.3g} is rounding; it is of another model, or was changed: export it again"
        )
    return apart
