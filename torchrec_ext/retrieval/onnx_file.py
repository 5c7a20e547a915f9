"""open_graph(): ONNX Runtime's session of a file that was checked before: domain ai.onnx alone, no external data.

ONNX Runtime reads a file with native code. The check walks the file's messages by the wire format of protobuf, and
copies no tensor. Numbers below are field numbers of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrec_ext.retrieval.manifest import ANEW, BundleError

_OWN = (b"", b"ai.onnx")
_DEEPEST = 32
# Messages that may hold a domain or a tensor: by field, the kind of message.
_KINDS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse",
        23: "sparse",
    },
    "sparse": {1: "tensor", 2: "tensor"},
    "opset": {},
    "tensor": {},
}
_DOMAIN = {"opset": 1, "node": 7}
_EXTERNAL = 13
_LOCATION = 14


def open_graph(path: Path, *, threads: int = 1) -> Any:
    """Returns the ``onnxruntime.InferenceSession`` of a graph with one output.

    Raises:
        BundleError: the file is no ONNX file, or has another domain, functions of its own, or external data.
    """
    # Imported here: it takes 60 ms.
    import onnxruntime

    content = path.read_bytes()
    try:
        check_graph(content)
    except (ValueError, IndexError) as error:
        raise BundleError(f"{path}: {error}; {ANEW}") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
    # Its errors have no class of their own.
    except Exception as error:
        why = str(error).splitlines()[0][:100]
        raise BundleError(
            f"{path}: ONNX Runtime cannot open it ({why}); {ANEW}"
        ) from None
    if len(session.get_outputs()) != 1:
        raise BundleError(
            f"{path}: has {len(session.get_outputs())} outputs, must have one; {ANEW}"
        )
    return session


def check_graph(content: bytes) -> None:
    """Refuses a model with another domain than ai.onnx, with functions, training or external data.

    Raises:
        ValueError: the content is none of a model, or has one of these.
    """
    _check("model", memoryview(content), 0)


def _check(kind: str, message: memoryview, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError("is nested too deeply for a graph")
    inner = _KINDS[kind]
    for number, value in _fields(message):
        inside = isinstance(value, memoryview)
        if number == _DOMAIN.get(kind) and not (inside and value in _OWN):
            domain = bytes(value[:40]).decode(errors="replace") if inside else value
            raise ValueError(
                f"has the operator domain '{domain}', a bundle's graphs have ai.onnx alone"
            )
        if kind == "tensor" and (
            number == _EXTERNAL or (number == _LOCATION and value)
        ):
            raise ValueError(
                "holds a tensor with external data, a bundle's graphs have none"
            )
        part = inner.get(number)
        if part in ("training", "function"):
            raise ValueError(f"holds a {part}, a bundle's graphs have none")
        if part is not None:
            if not inside:
                raise ValueError("is not an ONNX file")
            _check(part, value, depth + 1)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yields the number and value of each field: an int, or the bytes of a text, a tensor or a message."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        wire = tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, place = _varint(message, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("is not an ONNX file")
        if place + size > len(message):
            raise ValueError("is cut, or not an ONNX file")
        yield tag >> 3, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("is not an ONNX file")
