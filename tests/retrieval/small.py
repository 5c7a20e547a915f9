"""A small bundle whose logits are known: its graphs are written by hand, and numpy computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pyarrow as pa
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers, write_table
from torchrec_ext.retrieval.manifest import Manifest, write_manifest

WIDTH = 8
USERS = 20
GENRES = ("Comedy", "War", "Noir")
# A graph's opset and file format, as torch 2.13 writes them.
_OPSET = 20


# The graphs in ONNX's own text; a name that no function makes is a weight.
_QUERY = f"""query (float[B, {WIDTH}] user, float[B, {WIDTH}] history, float[B] age) => (float[B, {WIDTH}] vector) {{
    last = Constant <value_ints = [1]> ()
    column = Unsqueeze (age, last)
    aged = Mul (column, by_age)
    two = Add (user, history)
    three = Add (two, aged)
    vector = MatMul (three, layer)
}}"""
_CANDIDATE = f"""candidate (float[B, {WIDTH}] item) => (float[B, {WIDTH}] row) {{
    row = MatMul (item, layer)
}}"""
_PAIRS = f"""pairs (float[1, {WIDTH}] query, float[N, {WIDTH}] rows) => (float[N] logits) {{
    last = Constant <value_ints = [1]> ()
    BODY
    logits = Squeeze (column, last)
}}"""
_PRODUCT = "across = Transpose <perm = [1, 0]> (query) column = MatMul (rows, across)"
_TOP_NN = "sum = Add (rows, query) hidden = Relu (sum) column = MatMul (hidden, out)"


def write_graph(path: Path, text: str, *domains: str, **weights: Any) -> None:
    """Writes an ONNX file of a graph in ONNX's text, with its weights by name."""
    made = onnx.parser.parse_graph(text)
    for name, value in weights.items():
        made.initializer.append(numpy_helper.from_array(value, name))
    opsets = [helper.make_opsetid("", _OPSET)]
    opsets += [helper.make_opsetid(domain, 1) for domain in domains]
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    path.write_bytes(model.SerializeToString())


class Small:
    """A model of users (id, history, age) and items (id), in numpy, and the bundle of it.

    Args:
        items: number of items; their ids are 100, 110, 120, ...
        metric: ``product``, or ``top_nn`` with one hidden layer.
        seed: of all numbers.
    """

    def __init__(self, items: int = 50, metric: str = "top_nn", seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.metric = metric
        self.items = items

        def normal(*shape: int) -> NDArray[np.float32]:
            return draw.normal(size=shape).astype(np.float32)

        # Row 0 of both is for unknown ids.
        self.user_table = normal(USERS + 1, WIDTH)
        self.item_table = normal(items + 1, WIDTH)
        self.age = normal(WIDTH)
        self.query_layer = normal(WIDTH, WIDTH) / 3
        self.item_layer = normal(WIDTH, WIDTH) / 3
        self.out = normal(WIDTH, 1)
        self.ids = 100 + 10 * np.arange(items)
        self.rows = self.row(np.arange(1, items + 1))

    def row(self, item_rows: Any) -> NDArray[np.float32]:
        """Returns the (N, W) stored rows of rows of the item table."""
        rows: NDArray[np.float32] = self.item_table[item_rows] @ self.item_layer
        return rows

    def query(self, user: int, history: Sequence[int], age: float) -> Any:
        """Returns the (W,) query of a user's row, rows of the items of the history, and age."""
        mean = np.zeros(WIDTH, np.float32)
        if history:
            mean = self.item_table[list(history)].mean(0)
        summed = self.user_table[user] + mean + np.float32(age) * self.age
        return summed @ self.query_layer

    def logits(self, query: Any, rows: Any) -> Any:
        """Returns the (N,) logits of a query with rows (N, W)."""
        if self.metric == "product":
            return rows @ query
        return (np.maximum(rows + query, 0) @ self.out)[:, 0]

    def write(
        self,
        folder: Path,
        *,
        users: bool = True,
        certify: bool = True,
    ) -> Manifest:
        """Writes the bundle."""
        (folder / "tables").mkdir(parents=True)
        np.save(folder / "tables/user.npy", self.user_table)
        np.save(folder / "tables/item.npy", self.item_table)
        np.save(folder / "rows.npy", self.rows)
        self._write_graphs(folder)
        catalogue = Catalogue(
            ids=self.ids,
            features=pa.table({"item": np.arange(1, self.items + 1)}),
            titles=[f"Film {item}" for item in self.ids],
            attributes=self.attributes(),
        )
        catalogue.write(folder)
        named = self.users()
        if users:
            named.write(folder, np.array(self.ids))
        parity = self._write_audit(folder)
        content = self.content()
        content["audit"] = parity
        if users:
            content["users"] = {"rows": USERS, "key": "user"}
        manifest = write_manifest(
            folder,
            content,
            {"parity": {}, "versions": {}, "created": "2026-11-29T00:00:00Z"},
        )
        if certify:
            found = Bundle.load(folder, verify=False).audit()
            certificate = {**manifest.certificate, "parity": found._asdict()}
            manifest = write_manifest(folder, manifest.content, certificate)
        return manifest

    def users(self) -> NamedUsers:
        """The 20 users: user N has seen item N, is N years old, and has a history of two items."""
        rows = np.arange(1, USERS + 1)
        return NamedUsers(
            key="user",
            ids=rows,
            features=pa.table(
                {
                    "user": rows,
                    "history": [[int(row), int(row) + 1] for row in rows],
                    "age": rows / 10,
                }
            ),
            unknown={"user": 0, "history": [], "age": 0.0},
            seen_ids=pa.array([[each] for each in self.ids[:USERS]]),
        )

    def attributes(self) -> pa.Table:
        """Returns the genres and years of the items."""
        places = range(self.items)
        genres = [list(GENRES[: 1 + place % len(GENRES)]) for place in places]
        return pa.table({"genres": genres, "year": 1990 + np.arange(self.items) % 5})

    def known(self, user: int) -> Any:
        """Returns the (W,) query of one of the 20 users."""
        return self.query(user, [user, user + 1], user / 10)

    def content(self) -> dict[str, Any]:
        """Returns the manifest's content but for files, audit and users."""

        def leaf(
            column: str, kind: str, table: str = "", **more: Any
        ) -> dict[str, Any]:
            found = {"input": column, "kind": kind, "column": column, "table": table}
            return {**found, "dtype": "float32", **more}

        leaves = {
            "query": [
                leaf("user", "rows", "user"),
                leaf("history", "pooled", "item", pooling="mean"),
                leaf("age", "column"),
            ],
            "candidate": [leaf("item", "rows", "item")],
        }
        graphs = {
            side: {"leaves": found, "width": WIDTH} for side, found in leaves.items()
        }
        items = {"type": "int64", "oov": 0, "rows": self.items + 1}
        columns = {
            "query": {
                "user": {"type": "int64", "oov": 0, "rows": USERS + 1},
                "history": {**items, "type": "list<int64>"},
                "age": {"type": "float64"},
            },
            "candidate": {"item": items},
        }
        return {
            "metric": self.metric,
            "calibrated": True,
            "graphs": graphs,
            "towers": {
                "query": {"names": ["user"], "digest": "aa"},
                "candidate": {"names": ["item"], "digest": "bb"},
            },
            "columns": columns,
            "tables": {"user": "tables/user.npy", "item": "tables/item.npy"},
            "store": "fp32",
            "index": {"kind": "exact", "recall": 1.0},
            "items": {"rows": self.items},
            "users": None,
        }

    def _write_graphs(self, folder: Path) -> None:
        by_age = self.age[None]
        write_graph(
            folder / "query.onnx", _QUERY, by_age=by_age, layer=self.query_layer
        )
        write_graph(folder / "candidate.onnx", _CANDIDATE, layer=self.item_layer)
        if self.metric == "product":
            write_graph(folder / "pairs.onnx", _PAIRS.replace("BODY", _PRODUCT))
        else:
            top = _PAIRS.replace("BODY", _TOP_NN)
            write_graph(folder / "pairs.onnx", top, out=self.out)

    def _write_audit(self, folder: Path) -> dict[str, Any]:
        draw = np.random.default_rng(1)
        features = self.users().features
        positions = [draw.permutation(self.items)[:7].tolist() for _ in range(USERS)]
        logits = [
            self.logits(self.known(user + 1), self.rows[positions[user]])
            for user in range(USERS)
        ]
        table = features.append_column(
            "position", pa.array(positions, pa.list_(pa.int32()))
        ).append_column("logit", pa.array(logits, pa.list_(pa.float32())))
        write_table(folder / "audit.arrow", table)
        greatest = float(np.abs(np.concatenate(logits)).max())
        return {
            "pairs": 7 * USERS,
            "tolerance": max(1e-6, 1e-4 * greatest),
        }
