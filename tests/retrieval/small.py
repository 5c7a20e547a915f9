"""A small bundle whose logits are known: its graphs are written by onnx.helper, and numpy computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers
from torchrec_ext.retrieval.manifest import Manifest, write_manifest

WIDTH = 8
USERS = 20
GENRES = ("Comedy", "War", "Noir")
# A graph's opset and file format, as torch 2.13 writes them.
_OPSET = 20


def graph(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[Any]]],
    output: tuple[str, list[Any]],
    weights: Mapping[str, NDArray[Any]],
    *,
    domain: str = "",
) -> None:
    """Writes an ONNX file; ``inputs`` are types and shapes by name."""
    made = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, *each) for name, each in inputs.items()],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
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
        store: str = "fp32",
        users: bool = True,
        preprocessor: FittedPreprocessor | None = None,
        attributes: pa.Table | None = None,
        titles: bool = True,
        certify: bool = True,
    ) -> Manifest:
        """Writes the bundle."""
        (folder / "tables").mkdir(parents=True)
        np.save(folder / "tables/user.npy", self.user_table)
        np.save(folder / "tables/item.npy", self.item_table)
        dtype = np.float32 if store == "fp32" else np.float16
        np.save(folder / "rows.npy", self.rows.astype(dtype))
        self._write_graphs(folder)
        catalogue = Catalogue(
            ids=self.ids,
            features=pa.table({"item": np.arange(1, self.items + 1)}),
            titles=[f"Film {item}" for item in self.ids] if titles else None,
            attributes=attributes or self.attributes(),
        )
        catalogue.write(folder)
        named = self.users()
        if users:
            named.write(folder, np.array(self.ids))
        parity = self._write_audit(folder)
        if preprocessor is not None:
            preprocessor.save(folder / "preprocessor")
        content = self.content(store)
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

    def content(self, store: str = "fp32") -> dict[str, Any]:
        """Returns the manifest's content but for files, audit and users."""

        def leaf(
            column: str, kind: str, table: str = "", **more: Any
        ) -> dict[str, Any]:
            shape = [] if kind == "column" else [WIDTH]
            found = {"input": column, "kind": kind, "column": column, "table": table}
            return {**found, "dtype": "float32", "pooling": "", "shape": shape, **more}

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
            "store": store,
            "index": {"kind": "exact", "recall": 1.0},
            "items": {"rows": self.items},
            "users": None,
        }

    def _write_graphs(self, folder: Path) -> None:
        node = helper.make_node
        vector = (TensorProto.FLOAT, ["B", WIDTH])
        graph(
            folder / "query.onnx",
            [
                node("Unsqueeze", ["age", "last"], ["column"]),
                node("Mul", ["column", "by_age"], ["aged"]),
                node("Add", ["user", "history"], ["two"]),
                node("Add", ["two", "aged"], ["three"]),
                node("MatMul", ["three", "layer"], ["query"]),
            ],
            {"user": vector, "history": vector, "age": (TensorProto.FLOAT, ["B"])},
            ("query", ["B", WIDTH]),
            {
                "last": np.array([1]),
                "by_age": self.age[None],
                "layer": self.query_layer,
            },
        )
        graph(
            folder / "candidate.onnx",
            [node("MatMul", ["item", "layer"], ["row"])],
            {"item": vector},
            ("row", ["B", WIDTH]),
            {"layer": self.item_layer},
        )
        inputs = {
            "query": (TensorProto.FLOAT, [1, WIDTH]),
            "rows": (TensorProto.FLOAT, ["N", WIDTH]),
        }
        nodes = [
            node("Add", ["rows", "query"], ["sum"]),
            node("Relu", ["sum"], ["hidden"]),
            node("MatMul", ["hidden", "out"], ["column"]),
            node("Squeeze", ["column", "last"], ["logits"]),
        ]
        weights = {"out": self.out, "last": np.array([1])}
        if self.metric == "product":
            nodes = [
                node("Transpose", ["query"], ["out"], perm=[1, 0]),
                node("MatMul", ["rows", "out"], ["column"]),
                node("Squeeze", ["column", "last"], ["logits"]),
            ]
            del weights["out"]
        graph(folder / "pairs.onnx", nodes, inputs, ("logits", ["N"]), weights)

    def _write_audit(self, folder: Path) -> dict[str, Any]:
        from torchrec_ext.retrieval.catalogue import write_table

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
            "greatest": greatest,
        }
