"""Towers' dense layers and the top NN as ONNX files, checked equal before they are handed out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_ext.retrieval.projection import Projection


class ExportError(ValueError):
    """A network that cannot be exported, or whose file does not say what it says."""


def export_onnx(module: nn.Module, examples: Mapping[str, Tensor], path: Path | str, *, tolerance: float = 1e-5) -> float:
    """Writes a network of dense layers as ONNX, for any number of rows, and runs the file beside it.

    Tables stay behind: a tower is exported as its ``mlp``, over looked-up rows and dense columns side by side.

    Args:
        module: in evaluation mode.
        examples: its inputs by name, in order, each (N, D) with 2 rows or more; those of one dimension stay as long as they are.
        path: of the file.
        tolerance: greatest difference, absolute or relative, that is taken.

    Returns:
        The greatest absolute difference, over these rows and one more.

    Raises:
        ExportError: a layer that ONNX does not have, or outputs that differ by more.
        ValueError: a package is missing, or the network is in training mode.
    """
    _require("onnx", "onnxscript", "onnxruntime")
    import onnxruntime

    if module.training:
        raise ValueError("module: is in training mode, in which dropout and batch statistics act; call module.eval()")
    rows = torch.export.Dim("rows", min=2)
    dynamic = {name: {0: rows} if value.dim() > 1 else None for name, value in examples.items()}
    try:
        torch.onnx.export(
            module,
            tuple(examples.values()),
            str(path),
            input_names=list(examples),
            output_names=["output"],
            dynamo=True,
            dynamic_shapes=tuple(dynamic.values()),
            external_data=False,
            verbose=False,
        )
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's own message begins with advice to its developers
            cause = cause.__cause__
        first = str(cause).strip().splitlines()[0][:300]
        raise ExportError(f"{type(module).__name__} cannot be exported to ONNX: {type(cause).__name__}: {first}") from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    more = {name: torch.cat([value, value[:1]]) if value.dim() > 1 else value for name, value in examples.items()}
    return max(_difference(module, session, given, path, tolerance) for given in (examples, more))


def export_top(projection: Projection, path: Path | str) -> float:
    """The part of a pair, ``query`` (Hq,) and ``candidates`` (N, width) to ``output`` (N,); see :func:`export_onnx`.

    Raises:
        ExportError: also an interaction of which nothing can be projected.
    """
    if projection.query_width is None:
        raise ExportError(f"{type(projection.interaction).__name__} is not projected; export it as it is with export_onnx")
    inputs = {"query": torch.randn(projection.query_width), "candidates": torch.randn(4, projection.width)}
    return export_onnx(_Score(projection).eval(), inputs, path)


class _Score(nn.Module):
    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.projection.score(query, candidates)


def _difference(module: nn.Module, session: object, given: Mapping[str, Tensor], path: Path | str, tolerance: float) -> float:
    with torch.inference_mode():
        expected = module(*given.values()).numpy()
    (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})  # type: ignore[attr-defined]
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=tolerance, atol=tolerance):
        raise ExportError(f"'{path}': ONNX Runtime answers {found.ravel()[:3]}, the network {expected.ravel()[:3]}")
    return float(np.abs(found - expected).max())


def _require(*packages: str) -> None:
    for package in packages:
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise ValueError(f"ONNX export needs the package {package}: pip install 'torchrec-ext[onnx]'") from None
