"""Towers and top NN of a bundle as ONNX models, checked against it."""
