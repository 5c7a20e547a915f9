"""Graphs: a GraphSplit's three parts as ONNX files, and new weights written into them without a new export."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor

from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.split import GraphSplit, Part

GRAPHS = ("query", "candidate", "pairs")
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
        self._models = {name: _onnx(getattr(split, name), name) for name in GRAPHS}

    def renew(self, weights: Mapping[str, Tensor]) -> None:
        """Writes the numbers of other weights, by path in the model, into the graphs."""
        from onnx import numpy_helper

        values = self.split.numbers(weights)
        for name, model in self._models.items():
            part: Part = getattr(self.split, name)
            for tensor in model.graph.initializer:
                if tensor.name not in part.constants:
                    continue
                value = values[part.constants[tensor.name]].cpu().contiguous().numpy()
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


def _onnx(part: Part, name: str) -> Any:
    size = sum(value.nbytes for value in part.module.buffers())
    if size > _MOST_BYTES:
        raise BundleError(
            f"graph '{name}': {size / 2**30:.1f} GiB of weights, ONNX holds 2; look large tables up by an nn.Embedding "
            "of a column, which keeps them outside"
        )
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                part.module,
                part.examples,
                input_names=part.inputs,
                output_names=["logits" if name == "pairs" else _OUTPUTS[name]],
                dynamo=True,
                dynamic_shapes=part.dynamic,
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
            f"model: the {name} half cannot be an ONNX graph: {type(cause).__name__}: {first}; use another of torch's "
            "operators there"
        ) from None
    model = program.model_proto
    # Nodes hold the stack of their tracing, with local paths.
    model.ClearField("metadata_props")
    for each in (
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
        *model.graph.initializer,
    ):
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    model.graph.ClearField("metadata_props")
    return model


_OUTPUTS = {"query": "query", "candidate": "row"}


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
