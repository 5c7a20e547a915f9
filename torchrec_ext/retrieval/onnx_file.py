"""open_graph(): ONNX Runtime's session of a file that was checked before: domain ai.onnx alone, no external data.

ONNX Runtime reads a file with native code, and more with operators of its own, or with tensors in other files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torchrec_ext.retrieval.manifest import ANEW, BundleError

# ONNX Runtime's domains beside ai.onnx; it refuses all others by itself.
_DOMAIN = re.compile(
    rb"com\.microsoft[.\w]*|com\.ms\.[.\w]*|ai\.onnx\.[.\w]*|org\.pytorch[.\w]*"
)
# The key of external data as a text of its own, which begins behind its length, in any
# encoding of 8. As part of a column's name it stands behind another character.
_EXTERNAL = re.compile(rb"[\x00\x08]location")


def open_graph(path: Path, *, threads: int = 1) -> Any:
    """Returns the ``onnxruntime.InferenceSession`` of a graph.

    Raises:
        BundleError: the file is no ONNX file, or has another domain or external data.
    """
    # Imported here: it takes 60 ms.
    import onnxruntime

    content = path.read_bytes()
    if found := _DOMAIN.search(content):
        raise BundleError(
            f"{path}: has the operator domain '{found[0].decode()[:40]}', a bundle's graphs have ai.onnx alone; {ANEW}"
        )
    if _EXTERNAL.search(content):
        raise BundleError(
            f"{path}: holds a tensor with external data, a bundle's graphs have none; {ANEW}"
        )
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
    return session
