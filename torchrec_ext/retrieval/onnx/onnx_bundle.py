"""export_bundle(): a bundle's towers and top NN as ONNX files; running them needs only onnxruntime and numpy.

The files are compared with the bundle on the rows of its audit. A README next to them lists inputs and outputs and has
an example program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.retrieval.bundle import audit as audits
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.encoder import RowEncoder
from torchrec_ext.retrieval.bundle.manifest import read_json
from torchrec_ext.retrieval.bundle.request_columns import Read
from torchrec_ext.retrieval.onnx.layers import (
    EXPORTABLE,
    ExportError,
    PaddedTower,
    example_of,
    open_onnx,
    pairs_module,
    require_onnx,
    shapes_of,
    write_onnx,
)
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.schema.validation import listed

_NAME = "onnx.json"
TOP = "top"
_TOLERANCE = (
    1e-4  # of the greatest output, or of 1: another runtime sums in another order
)
_SINGLE = 8  # rows to run also one by one


def check_onnx(bundle: Bundle, folder: Path | str) -> dict[str, float]:
    """Compares the files of a folder with the bundle on the rows of its audit.

    Returns:
        The greatest difference of each tower and of ``top``; the logits of ``top`` come from the files alone.

    Raises:
        ExportError: a difference is beyond 1e-4; the message names the tower.
    """
    folder = Path(folder)
    description = read_json(folder / _NAME)
    pairs, logits = audits.Audit.open(bundle.folder)
    outputs: dict[str, Tensor] = {}
    differences: dict[str, float] = {}
    for encoder, name, audit_rows, expected in audited_towers(bundle, pairs):
        outputs[name] = expected
        if name in description["towers"]:
            path = folder / description["towers"][name]["file"]
            columns = PaddedTower(encoder, name).columns(audit_rows)
            # From the file, so that the top NN is checked with what its callers will
            # give it.
            outputs[name], differences[name] = _check_tower(
                f"tower '{name}'", path, columns, expected
            )
    if TOP in description:
        differences[TOP] = _check_top(bundle, folder, description, outputs, logits)
    return differences


def audited_towers(
    bundle: Bundle, pairs: audits.Audit
) -> Iterator[tuple[RowEncoder, str, Read, Tensor]]:
    """Yields each tower's encoder and name, the audit's rows as parsed by the encoder, and the tower's outputs."""
    for encoder, table in zip(
        bundle.encoders, (pairs.queries, pairs.candidates), strict=True
    ):
        audit_rows = encoder.read(table.to_pydict())
        for name, outputs in zip(
            encoder.model.towers, encoder.outputs(audit_rows), strict=True
        ):
            yield encoder, name, audit_rows, outputs


def _check_tower(
    what: str, path: Path, columns: Mapping[str, Tensor], expected: Tensor
) -> tuple[Tensor, float]:
    """Returns a file's outputs for all rows, and their greatest difference from ``expected``, single rows included."""
    run = open_onnx(path)
    inputs = {name: value.numpy() for name, value in columns.items()}
    outputs = run(inputs)
    # Single rows too: a traced graph may have fixed the number of rows, or broadcast a
    # row over a batch.
    single_outputs = []
    for row in range(_SINGLE):
        single_outputs.append(
            run({name: value[row : row + 1] for name, value in inputs.items()})
        )
    difference = max(
        _check_outputs(what, path, outputs, expected),
        _check_outputs(what, path, np.concatenate(single_outputs), expected[:_SINGLE]),
    )
    return torch.from_numpy(outputs), difference


def _check_top(
    bundle: Bundle,
    folder: Path,
    description: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    logits: Tensor,
) -> float:
    query, candidates, top = (
        open_onnx(folder / description[name]["file"])
        for name in ("query", "candidates", TOP)
    )
    towers = torch.cat([outputs[name] for name in bundle.query], dim=1)
    queries = query({"towers": towers.numpy()})
    rows = candidates({"tower": outputs[bundle.candidate].numpy()})
    # Each audited pair by itself, then one query with all candidates, as a caller runs
    # it.
    pairs = [
        top({"query": user, "candidates": item[None]})
        for user, item in zip(queries, rows, strict=True)
    ]
    difference = _check_outputs(
        TOP, folder / description[TOP]["file"], np.concatenate(pairs), logits
    )
    many = top({"query": queries[0], "candidates": rows})
    with torch.inference_mode():
        expected = bundle.projection.score(
            torch.from_numpy(queries[0]), torch.from_numpy(rows)
        )
    return max(
        difference,
        _check_outputs(TOP, folder / description[TOP]["file"], many, expected),
    )


def _check_outputs(
    what: str, path: Path, outputs: NDArray[Any], expected: Tensor
) -> float:
    if outputs.shape != tuple(expected.shape):
        raise ExportError(
            f"{what}: {path.name} answers {outputs.shape}, the bundle {tuple(expected.shape)}; export it again"
        )
    difference = audits.largest_difference(torch.from_numpy(outputs), expected)
    allowed = audits.tolerance(expected, _TOLERANCE)
    if not difference <= allowed:
        raise ExportError(
            f"{what}: {path.name} differs from the bundle by up to {difference:.3g} on {len(expected)} audit rows, at "
            f"most {allowed:.3g} is rounding; it is of another model, or was changed: export it again"
        )
    return difference


_HEAD = """# A recommender as ONNX files

Written from the bundle {bundle} and compared with it. `onnx.json` says the same as this page. Axes: B rows (1 for one \
request), N
candidates, I items of the catalogue, L the longest list of the rows, which may differ from feature to feature.

| part | file | inputs | output `output` | greatest difference |
|---|---|---|---|---|
"""
_LISTS = """
A list of ids is a row padded at its end with -1, an empty one a row of -1 alone; an id that is no row of the table is \
the unknown.

{codes}

`examples.npz` holds rows to try with (`TOWER.INPUT`, `TOWER.output`), and the `logits` of their pairs, first with \
first.
"""
_RAW = "Ids are what the bundle's own columns hold: {query} of a query, {candidate} of a candidate."
_CODES = (
    "Ids and numbers are what the bundle's `preprocessor/` makes of the raw columns ({query} of a query, {candidate} "
    "of a candidate): its JSON names the steps, its parquet files hold the codes of words."
)
_PROGRAM = """
Recommend to the first example's user, in this folder:

```py
import json

import numpy as np
import onnxruntime

said = json.load(open("onnx.json"))
examples = np.load("examples.npz")


def run(part, given):
    session = onnxruntime.InferenceSession(part["file"], providers=["CPUExecutionProvider"])  # keep it in a server
    return session.run(None, given)[0]


def tower(name):
    part = said["towers"][name]
    return run(part, {each["name"]: examples[f"{name}.{each['name']}"][:1] for each in part["inputs"]})


user = np.concatenate([tower(name) for name in said["query_towers"]], axis=1)
query = run(said["query"], {"towers": user})[0]
scores = run(said["top"], {"query": query, "candidates": np.load("candidates.npy")})
best = np.argsort(-scores, kind="stable")[:10]
print(np.load("ids.npy")[best].tolist(), scores[best].tolist())
```
"""


def readme(description: Mapping[str, Any]) -> str:
    """Returns the text of the README for the files described by ``onnx.json``."""
    graphs = {f"tower {name}": graph for name, graph in description["towers"].items()}
    graphs |= {
        name: description[name]
        for name in ("query", "candidates", "top")
        if name in description
    }
    text = _HEAD.format(bundle=description["bundle"][:12])
    for name, graph in graphs.items():
        difference = description["differences"].get(name.removeprefix("tower "))
        difference_text = ""
        if difference is not None:
            difference_text = f"{difference:.1g}"
        inputs = []
        for each in graph["inputs"]:
            inputs.append(f"`{each['name']}` {_axes(each)}: {each['meaning']}")
        row = [
            name,
            f"`{graph['file']}`",
            "; ".join(inputs),
            _axes(graph["output"]),
            difference_text,
        ]
        text += f"| {' | '.join(row)} |\n"
    for file, array in description.get("arrays", {}).items():
        text += f"| {array['meaning']} | `{file}` | | {_axes(array)} | |\n"
    columns = {}
    for role, types in description["raw_columns"].items():
        columns[role] = ", ".join(f"`{name}` {kind}" for name, kind in types.items())
    codes = _CODES if description["preprocessed"] else _RAW
    text += _LISTS.format(codes=codes.format(**columns))
    # The program runs every part.
    if "top" in description and set(description["query_towers"]) <= set(
        description["towers"]
    ):
        return text + _PROGRAM
    return f"{text}\nLeft out: {', '.join(description['skipped'])}.\n"


def _axes(value: Mapping[str, Any]) -> str:
    shape = ", ".join(map(str, value["shape"]))
    comma = "," if len(value["shape"]) == 1 else ""
    return f"({shape}{comma}) {value['dtype']}"


_EXAMPLES = 8
_BLOCK = 65_536  # rows copied at a time
_INLINE = 2**30  # most bytes of weights inside one file; protobuf's limit is 2 GiB


def export_bundle(
    bundle: Bundle,
    out: Path | str,
    *,
    skip: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes towers, top NN, the candidates' rows and ids, examples, ``onnx.json`` and a README with a program.

    Every file is compared with the bundle on the audit's rows, in a batch and one by one, before the folder gets its
    name.

    Args:
        bundle: loaded bundle.
        out: folder to make, outside of the bundle, because a bundle with further files is refused.
        skip: names of towers to leave out, or ``top``.
        overwrite: replace an earlier result.

    Returns:
        The content of ``onnx.json``.

    Raises:
        ExportError: a tower or the top NN cannot be exported, or its file gives other outputs; the message names it.
        ValueError: a package is missing, or ``skip`` names none of the bundle's towers.
        DataError: the folder exists already, or cannot be written.
    """
    require_onnx()
    out = Path(out)
    if "tables" in bundle.manifest.content:
        raise ExportError(
            f"{bundle.folder}: its tables are int8, ONNX files have theirs in fp32; export the run again with "
            "tables=trained"
        )
    check_exportable(
        {name: tower["class"] for name, tower in bundle.architecture.towers.items()},
        skip,
    )
    target = out.resolve()
    source = bundle.folder.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise ValueError(
            f"{out}: is the bundle {bundle.folder}, in it, or around it; choose a folder beside it"
        )
    with whole_folder(out, overwrite=overwrite, mark=_NAME) as folder:
        description: dict[str, Any] = {
            "bundle": bundle.manifest.digest,
            "query_towers": bundle.query,
            "candidate_tower": bundle.candidate,
        }
        description |= {
            "skipped": sorted(skip),
            "towers": _write_towers(bundle, folder, skip),
        }
        if TOP not in skip:
            description |= _write_top(bundle, folder)
        description["raw_columns"] = {
            "query": bundle.request_columns,
            "candidate": bundle.candidate_columns,
        }
        description["preprocessed"] = (bundle.folder / "preprocessor").is_dir()
        (folder / _NAME).write_text(json.dumps(description, indent=1) + "\n")
        # check_onnx() reads the description that was just written, and its result
        # completes it.
        description["differences"] = check_onnx(bundle, folder)
        _write_examples(bundle, folder, description)
        (folder / _NAME).write_text(json.dumps(description, indent=1) + "\n")
        (folder / "README.md").write_text(readme(description))
    return description


def describe_onnx(description: Mapping[str, Any], out: Path) -> str:
    """Returns lines for a report: the written folder, and its differences from the bundle."""
    differences = ", ".join(
        f"{name} {value:.1g}" for name, value in description["differences"].items()
    )
    omission = ""
    if description["skipped"]:
        omission = f"; without {', '.join(description['skipped'])}"
    return (
        f"onnx: {out} (on {audits.PAIRS} audit rows it differs from the bundle by at most: {differences}{omission})\n"
        f"serve it with numpy and onnxruntime: {out / 'README.md'}"
    )


def check_exportable(towers: Mapping[str, str], skip: Sequence[str] = ()) -> None:
    """Refuses towers of unsupported classes, before anything is written.

    Args:
        towers: class name of each tower, by the tower's name.
        skip: names of towers to leave out, or ``top``.

    Raises:
        ExportError: a tower's class is not supported, such as a sequence encoder.
        ValueError: ``skip`` contains an unknown name.
    """
    wrong = [name for name in skip if name not in (*towers, TOP)]
    if wrong:
        raise ValueError(f"skip: {wrong[0]!r} is none of {listed((*towers, TOP))}")
    for name, kind in towers.items():
        if name not in skip and kind not in EXPORTABLE:
            raise ExportError(
                f"tower '{name}': a {kind} cannot be exported to ONNX, only towers of pooled tables ("
                f"{', '.join(EXPORTABLE)}); add --onnx-skip {name}, and take its vectors from the bundle"
            )


def _write_towers(bundle: Bundle, folder: Path, skip: Sequence[str]) -> dict[str, Any]:
    description = {}
    (folder / "towers").mkdir()
    towers: list[tuple[RowEncoder, str]] = []
    for encoder in bundle.encoders:
        towers += [(encoder, name) for name in encoder.model.towers]
    for number, (encoder, name) in enumerate(towers):
        if name in skip:
            continue
        tower = PaddedTower(encoder, name)
        # A tower's name may hold characters that no file name can have.
        stem = name if name.isidentifier() else f"{number:03}"
        file = f"towers/{stem}.onnx"
        size = sum(value.nbytes for value in tower.parameters())
        with _name_errors(f"tower '{name}'"):
            example = example_of(tower.inputs)
            write_onnx(
                tower,
                example,
                shapes_of(tower.inputs),
                folder / file,
                external=size > _INLINE,
            )
        description[name] = {
            "file": file,
            "inputs": [vars(each) for each in tower.inputs],
            "output": _value(
                "output",
                ["B", tower.out_features],
                f"what tower '{name}' makes of B rows",
            ),
        }
    return description


def _write_top(bundle: Bundle, folder: Path) -> dict[str, Any]:
    projection = bundle.projection
    width = bundle.query_width
    towers: Any = bundle.encoders[0].model.towers.values()
    widths = [int(tower.out_features) for tower in towers]
    candidate = bundle.encoders[1].width
    parts = {
        "query": (_Half(projection, "query"), {"towers": torch.randn(4, width)}),
        "candidates": (
            _Half(projection, "candidates"),
            {"tower": torch.randn(4, candidate)},
        ),
        TOP: pairs_module(projection, widths),
    }
    for name, (module, example) in parts.items():
        with _name_errors(TOP):
            write_onnx(module, example, None, folder / f"{name}.onnx")
    stored = bundle.projected
    ids = _write_rows(stored, folder)
    id_type = "int64" if ids.dtype.kind == "i" else "str"
    query = projection.query_width or width
    return {
        "query": _file(
            "query.onnx",
            [
                _value(
                    "towers",
                    ["B", width],
                    f"outputs of {', '.join(bundle.query)} encoder by encoder",
                )
            ],
            ["B", query],
        ),
        "candidates": _file(
            "candidates.onnx",
            [_value("tower", ["N", candidate], f"outputs of {bundle.candidate}")],
            ["N", projection.width],
        ),
        TOP: _file(
            "top.onnx",
            [
                _value("query", [query], "one row of query.onnx"),
                _value(
                    "candidates",
                    ["N", projection.width],
                    "rows of candidates.npy, or of candidates.onnx",
                ),
            ],
            ["N"],
        ),
        "arrays": {
            "candidates.npy": _value(
                "candidates",
                ["I", projection.width],
                f"stored rows of the catalogue, from {stored.dtype}",
            ),
            "ids.npy": {
                **_value("ids", ["I"], "what the items are called"),
                "dtype": id_type,
            },
        },
    }


def _write_rows(stored: EmbeddingStore, folder: Path) -> NDArray[Any]:
    """Writes the catalogue's rows and ids as plain arrays; returns the ids."""
    shape = (len(stored), stored.width)
    rows = np.lib.format.open_memmap(
        folder / "candidates.npy", mode="w+", dtype=np.float32, shape=shape
    )
    for start in range(0, len(stored), _BLOCK):
        rows[start : start + _BLOCK] = stored.block(start, start + _BLOCK).numpy()
    rows.flush()
    ids = stored.ids.ids()
    # Objects would need pickle, which a reader should not load from others.
    if ids.dtype == object:
        ids = ids.astype(str)
    np.save(folder / "ids.npy", ids, allow_pickle=False)
    return ids


class _Half(nn.Module):
    """A projection's layers for the query alone, or for the candidates alone."""

    def __init__(self, projection: nn.Module, method: str) -> None:
        super().__init__()
        self.projection = projection
        self._method = method
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        return getattr(self.projection, self._method)(rows).clone()  # type: ignore[no-any-return]


def _write_examples(
    bundle: Bundle, folder: Path, description: Mapping[str, Any]
) -> None:
    """Writes ``TOWER.INPUT`` and ``TOWER.output`` of the audit's first rows, and the ``logits`` of these pairs."""
    pairs, logits = audits.Audit.open(bundle.folder)
    arrays: dict[str, Any] = {"logits": logits[:_EXAMPLES].numpy()}
    for encoder, name, audit_rows, outputs in audited_towers(bundle, pairs):
        if name in description["towers"]:
            columns = PaddedTower(encoder, name).columns(audit_rows)
            arrays |= {
                f"{name}.{column}": value[:_EXAMPLES].numpy()
                for column, value in columns.items()
            }
            arrays[f"{name}.output"] = outputs[:_EXAMPLES].numpy()
    np.savez(folder / "examples.npz", **arrays)


@contextmanager
def _name_errors(what: str) -> Iterator[None]:
    try:
        yield
    except ExportError as error:
        name = what.removeprefix("tower ").strip("'")
        raise ExportError(
            f"{what}: {error}; leave it out by name (--onnx-skip {name})"
        ) from error


def _value(name: str, shape: Sequence[Any], meaning: str) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": "float32", "meaning": meaning}


def _file(
    file: str, inputs: list[dict[str, Any]], shape: Sequence[Any]
) -> dict[str, Any]:
    return {"file": file, "inputs": inputs, "output": _value("output", shape, "")}
