"""ONNX files of a tower's dense layers and of the top NN, which say what the networks say."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.examples import small_model
from torchrec_ext.modules.interaction import DeepCross, TopMLP
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.onnx.layers import ExportError, export_onnx, export_top


def test_the_top_nn_and_a_towers_dense_layers_are_equal(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"the package {package} is not installed (extra `onnx`)")
    import onnxruntime

    made = projection(TopMLP([8, 8], (8, 4), normalization="layer"), 8)
    assert export_top(made, tmp_path / "top.onnx") < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "top.onnx"), providers=["CPUExecutionProvider"])
    query, rows = torch.randn(8), torch.randn(33, 8)
    (found,) = session.run(None, {"query": query.numpy(), "candidates": rows.numpy()})
    assert torch.allclose(torch.from_numpy(found), made.score(query, rows), atol=1e-5)
    tower = small_model().towers["item"].eval()
    assert export_onnx(tower.mlp, {"columns": torch.randn(4, tower.mlp[0].in_features)}, tmp_path / "item.onnx") < 1e-5


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match="DeepCross is not projected"):
        export_top(projection(DeepCross([4, 4]), 4), tmp_path / "x.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"ONNX export needs the package onnx: pip install 'torchrec-ext\[onnx\]'"):
        export_onnx(nn.Linear(2, 1).eval(), {"x": torch.ones(2, 2)}, tmp_path / "x.onnx")
