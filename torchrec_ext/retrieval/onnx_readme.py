"""The README beside ONNX files: what goes in, what comes out, and a program of numpy and onnxruntime that serves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = """# A recommender as ONNX files

Written from the bundle {bundle} and compared with it. `onnx.json` says the same as this page. Axes: B rows (1 for one request), N
candidates, I items of the catalogue, L the longest list of the rows, which may differ from feature to feature.

| part | file | inputs | output `output` | greatest difference |
|---|---|---|---|---|
"""
_LISTS = """
A list of ids is a row padded at its end with -1, an empty one a row of -1 alone; an id that is no row of the table is the unknown.

{codes}

`examples.npz` holds rows to try with (`TOWER.INPUT`, `TOWER.output`), and the `logits` of their pairs, first with first.
"""
_RAW = "Ids are what the bundle's own columns hold: {query} of a query, {candidate} of a candidate."
_CODES = (
    "Ids and numbers are what the bundle's `preprocessor/` makes of the raw columns ({query} of a query, {candidate} of a "
    "candidate): its JSON names the steps, its parquet files hold the codes of words."
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


def readme(said: Mapping[str, Any]) -> str:
    """The page for what ``onnx.json`` says."""
    parts = {f"tower {name}": part for name, part in said["towers"].items()}
    parts |= {name: said[name] for name in ("query", "candidates", "top") if name in said}
    text = _HEAD.format(bundle=said["bundle"][:12])
    for name, part in parts.items():
        apart = said["differences"].get(name.removeprefix("tower "))
        shown = "" if apart is None else f"{apart:.1g}"
        inputs = "; ".join(_shown(each) for each in part["inputs"])
        text += f"| {name} | `{part['file']}` | {inputs} | {_axes(part['output'])} | {shown} |\n"
    for file, array in said.get("arrays", {}).items():
        text += f"| {array['meaning']} | `{file}` | | {_axes(array)} | |\n"
    columns = {side: ", ".join(f"`{name}` {kind}" for name, kind in own.items()) for side, own in said["raw_columns"].items()}
    text += _LISTS.format(codes=(_CODES if said["preprocessed"] else _RAW).format(**columns))
    whole = "top" in said and set(said["query_towers"]) <= set(said["towers"])
    return text + (_PROGRAM if whole else f"\nLeft out: {', '.join(said['skipped'])}.\n")


def _shown(value: Mapping[str, Any]) -> str:
    return f"`{value['name']}` {_axes(value)}: {value['meaning']}"


def _axes(value: Mapping[str, Any]) -> str:
    shape = ", ".join(map(str, value["shape"]))
    return f"({shape}{',' if len(value['shape']) == 1 else ''}) {value['dtype']}"
