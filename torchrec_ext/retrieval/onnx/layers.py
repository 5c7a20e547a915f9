"""Towers' dense layers and the top NN as ONNX files, checked equal before they are handed out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrec_ext.retrieval.index.projection import Projection


class ExportError(ValueError):
    """A network that cannot be exported, or whose file does not say what it says."""


def export_onnx(
    module: nn.Module, examples: Mapping[str, Tensor], path: Path | str, *, tolerance: float = 1e-5
) -> float:
    """Writes a network of dense layers as ONNX, for any number of rows, and runs the file beside it.

    Tables stay behind: a tower is exported as its ``mlp``, over looked-up rows and dense columns side by side.

    Args:
        module: in evaluation mode.
        examples: its inputs by name, in order, each (N, D) with 2 rows or more; those of one dimension stay as long as
            they are.
        path: of the file.
        tolerance: greatest difference, absolute or relative, that is taken.

    Returns:
        The greatest absolute difference, over these rows and one more.

    Raises:
        ExportError: a layer that ONNX does not have, or outputs that differ by more.
        ValueError: a package is missing, or the network is in training mode.
    """
    rows = torch.export.Dim("rows", min=2)
    write_onnx(module, examples, tuple({0: rows} if value.dim() > 1 else None for value in examples.values()), path)
    run = open_onnx(path)
    more = {name: torch.cat([value, value[:1]]) if value.dim() > 1 else value for name, value in examples.items()}
    return max(_difference(module, run, given, path, tolerance) for given in (examples, more))


def export_top(projection: Projection, path: Path | str, *, query_widths: Sequence[int] | None = None) -> float:
    """The part of a pair, ``query`` (Hq,) and ``candidates`` (N, width) to ``output`` (N,); see :func:`export_onnx`.

    Args:
        projection: of the interaction.
        path: of the file.
        query_widths: D of each query tower, for an interaction of which nothing can be projected: its query is their
            outputs.

    Raises:
        ExportError: also such an interaction without ``query_widths``.
    """
    if projection.query_width is None and query_widths is None:
        raise ExportError(
            f"{type(projection.interaction).__name__} is not projected; give query_widths, or export it as it is with "
            "export_onnx"
        )
    width = projection.query_width or sum(query_widths or ())
    inputs = {"query": torch.randn(width), "candidates": torch.randn(4, projection.width)}
    score = _Score(projection) if projection.query_width else _Pairs(projection, query_widths or ())
    return export_onnx(score.eval(), inputs, path)


class _Score(nn.Module):
    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.projection.score(query, candidates)


class _Pairs(nn.Module):
    """The interaction as it is: its ``score_all`` goes by blocks, whose number would be fixed in the file."""

    def __init__(self, projection: Projection, widths: Sequence[int]) -> None:
        super().__init__()
        self.interaction, self._widths = projection.interaction, list(widths)

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        queries = torch.split(
            query.expand(candidates.shape[0], -1), self._widths, dim=1
        )  # of len() it would keep the number
        return self.interaction([*queries, candidates])  # type: ignore[no-any-return]


def write_onnx(
    module: nn.Module, examples: Mapping[str, Tensor], dynamic: Any, path: Path | str, *, external: bool = False
) -> None:
    """Writes ``module`` without comparing anything.

    Args:
        module: in evaluation mode.
        examples: its inputs by name, in order.
        dynamic: ``dynamic_shapes`` of :func:`torch.export.export`.
        path: of the file.
        external: put the weights beside it, into ``PATH.data``: a file of ONNX holds at most 2 GB.

    Raises:
        ExportError: a layer that ONNX does not have.
        ValueError: a package is missing, or the network is in training mode.
    """
    require_onnx()
    if module.training:
        raise ValueError("module: is in training mode, in which dropout and batch statistics act; call module.eval()")
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                module,
                tuple(examples.values()),
                input_names=list(examples),
                output_names=["output"],
                dynamo=True,
                dynamic_shapes=dynamic,
                verbose=False,
            )
            for node in (
                program.model.graph.all_nodes()
            ):  # each bears the stack it was traced in, with the paths of this machine
                node.metadata_props.clear()
            program.save(str(path), external_data=external)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's own message begins with advice to its developers
            cause = cause.__cause__
        first = (str(cause).strip().splitlines() or [""])[0][:300]
        raise ExportError(
            f"{type(module).__name__} cannot be exported to ONNX: {type(cause).__name__}: {first}"
        ) from error


def open_onnx(path: Path | str) -> Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]:
    """The file in ONNX Runtime, on the CPU: from inputs by name to its output.

    Raises:
        ExportError: now or when called: the runtime does not take the file, or the inputs.
    """
    import onnxruntime

    def told(action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return action(*arguments, **options)
        except Exception as error:  # of onnxruntime's own kinds, which have no common one
            raise ExportError(f"'{path}': ONNX Runtime refuses it: {str(error).strip()[:300]}") from error

    session = told(onnxruntime.InferenceSession, str(path), providers=["CPUExecutionProvider"])
    return lambda given: told(session.run, None, dict(given))[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch's exporter says of packages that it can do without, and of how it names axes."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _difference(
    module: nn.Module, run: Callable[..., NDArray[Any]], given: Mapping[str, Tensor], path: Path | str, tolerance: float
) -> float:
    with torch.inference_mode():
        expected = module(*given.values()).numpy()
    found = run({name: value.numpy() for name, value in given.items()})
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=tolerance, atol=tolerance):
        raise ExportError(f"'{path}': ONNX Runtime answers {found.ravel()[:3]}, the network {expected.ravel()[:3]}")
    return float(np.abs(found - expected).max())


def require_onnx() -> None:
    """Raises ValueError where a package of the extra ``onnx`` is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise ValueError(f"ONNX export needs the package {package}: pip install 'torchrec-ext[onnx]'") from None
