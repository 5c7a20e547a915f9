"""The ONNX file of the top NN, which says what the network says."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.onnx.layers import pairs_module, write_onnx


def test_the_top_nn_is_equal_for_any_number_of_rows(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(
            package, reason=f"the package {package} is not installed (extra `onnx`)"
        )
    import onnxruntime

    made = projection(TopMLP([8, 8], (8, 4), normalization="layer"), 8)
    top, example = pairs_module(made, [8])
    write_onnx(top, example, None, tmp_path / "top.onnx")
    session = onnxruntime.InferenceSession(
        str(tmp_path / "top.onnx"), providers=["CPUExecutionProvider"]
    )
    for count in (1, 33):
        query, rows = torch.randn(8), torch.randn(count, 8)
        (found,) = session.run(
            None, {"query": query.numpy(), "candidates": rows.numpy()}
        )
        assert torch.allclose(
            torch.from_numpy(found), made.score(query, rows), atol=1e-5
        )


def test_a_network_in_training_mode_is_refused(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(
            package, reason=f"the package {package} is not installed (extra `onnx`)"
        )
    with pytest.raises(ValueError, match="is in training mode"):
        write_onnx(nn.Linear(2, 1), {"x": torch.ones(2, 2)}, None, tmp_path / "x.onnx")


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        ValueError,
        match=r"ONNX export needs the package onnx: pip install 'torchrec-ext\[onnx\]'",
    ):
        write_onnx(
            nn.Linear(2, 1).eval(), {"x": torch.ones(2, 2)}, None, tmp_path / "x.onnx"
        )
