"""Graphs: a GraphSplit's three parts as ONNX files, and new weights written into them without a new export."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn

from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.split import GraphSplit

# The graphs, and the name of the output of each.
GRAPHS = {"query": "vector", "candidate": "row", "pairs": "logits"}
_MOST_BYTES = 2**31 - 1  # of a protobuf message


class Graphs:
    """The three ONNX graphs of a network; renewed, they are those of a network of the same layers with other weights.

    Args:
        split: the network in parts.

    Raises:
        BundleError: ONNX lacks one of its functions, a package is missing, or weights outside of tables exceed 2 GB.
    """

    def __init__(self, split: GraphSplit) -> None:
        require_onnx()
        self.split = split
        together = _Together(split)
        self._models = _onnx(split, together)
        # Of each initializer that is a weight of the model.
        self._paths: dict[str, str] = {}
        for prefix, part in together.named_modules():
            for name, path in getattr(part, "weights", {}).items():
                self._paths[f"{prefix}.{name}"] = path.removeprefix("model.")

    def renew(self, weights: Mapping[str, Tensor]) -> None:
        """Writes the numbers of other weights, on the CPU and by path in the model, into the graphs."""
        from onnx import numpy_helper

        for name, model in self._models.items():
            for tensor in model.graph.initializer:
                weight = weights.get(self._paths.get(tensor.name, ""))
                if weight is None:
                    continue
                value = weight.numpy()
                if list(value.shape) != list(tensor.dims):
                    raise BundleError(
                        f"graph '{name}': weight of shape {list(value.shape)}, was {list(tensor.dims)}; export anew"
                    )
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))

    def write(self, folder: Path) -> None:
        """Writes the three files."""
        for name, model in self._models.items():
            (folder / f"{name}.onnx").write_bytes(
                model.SerializeToString(deterministic=True)
            )


class _Together(nn.Module):
    """The three parts side by side, so that one run of torch's exporter writes them all."""

    def __init__(self, split: GraphSplit) -> None:
        super().__init__()
        self.query = split.query
        self.candidate = split.candidate
        self.pairs = split.pairs

    def forward(
        self, query: Sequence[Tensor], candidate: Sequence[Tensor], pairs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(*query), self.candidate(*candidate), self.pairs(*pairs)


def _onnx(split: GraphSplit, together: _Together) -> dict[str, Any]:
    """Returns the ONNX model of each part."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    size = sum(value.nbytes for value in together.buffers())
    if size > _MOST_BYTES:
        raise BundleError(
            f"model: {size / 2**30:.1f} GiB of weights outside of tables, ONNX holds 2; look large tables up by an "
            "nn.Embedding of a column, which keeps them outside"
        )
    parts = [getattr(split, name) for name in GRAPHS]
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                together,
                tuple(part.examples for part in parts),
                input_names=[name for part in parts for name in part.inputs],
                output_names=list(GRAPHS.values()),
                dynamo=True,
                dynamic_shapes=tuple(part.dynamic for part in parts),
                optimize=False,
                verbose=False,
            )
    except Exception as error:
        cause: BaseException = error
        # torch's own message begins with advice to its developers.
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = str(cause).strip().partition("\n")[0][:300]
        raise BundleError(
            f"model: forward cannot be an ONNX graph: {type(cause).__name__}: {first}; use another of torch's "
            "operators there"
        ) from None
    # Nodes hold the stack of their tracing, with local paths.
    ClearMetadataAndDocStringPass()(program.model)
    return {
        name: _cut_out(program.model, part.inputs, output)
        for part, (name, output) in zip(parts, GRAPHS.items(), strict=True)
    }


def _cut_out(model: Any, inputs: Sequence[str], output: str) -> Any:
    """Returns the part of a model that computes ``output`` from ``inputs``, as ONNX's message."""
    import onnx_ir

    part = onnx_ir.convenience.extract(model.graph, inputs, [output])
    made = onnx_ir.to_proto(onnx_ir.Model(part, ir_version=model.ir_version))
    graph = made.graph
    # The values' and weights' shapes alone, without notes, and in one order.
    del graph.value_info[:]
    graph.initializer.sort(key=attrgetter("name"))
    for each in (*graph.input, *graph.output, *graph.initializer):
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    return made


def require_onnx() -> None:
    """Refuses an export without the packages of the extra ``export``."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise BundleError(
                f"an export needs the package {package}: pip install 'torchrec-ext[export]'"
            ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's warnings about optional packages and axis names."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
