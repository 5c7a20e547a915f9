"""write_compiled(): a bundle's scoring as one package of machine code, and a C++ program that serves it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.scorer.candidates import CandidateScorer
from torchrec_ext.retrieval.scorer.compiled import UserScorer
from torchrec_ext.retrieval.store.store import ROWS, SCALES
from torchrec_ext.sealed import measure_file

CERTIFICATE = "scores.json"
_PACKAGE = "scores.pt2"
_INPUTS = "inputs.txt"
_PROGRAM = "serve.cpp"
_IDS = "ids_ids.npy"


def write_compiled(
    bundle: Bundle, out: Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Compiles a bundle's scoring and writes it to a folder beside the bundle, which itself holds no code.

    The package is machine code: load it only from an author you trust. Tables and stored rows stay in the bundle;
    ``inputs.txt`` says where. ``serve.cpp`` maps them and answers requests of the model's own columns, without
    preprocessing.

    Returns:
        The certificate, as in ``scores.json``: digest of the bundle, difference from the uncompiled scores, and the
        machine it is for. Servers on this machine load the same code from the cache, by ``compile="auto"``.

    Raises:
        BundleError: the bundle cannot be scored like this, or there is no compiler.
        DataError: the folder exists already, or cannot be written.
    """
    encoder = bundle.encoders[0]
    if (
        not UserScorer.takes(bundle)
        or bundle.projection.query_inputs is None
        or len(bundle.projected) < 2
    ):
        raise BundleError(
            f"{bundle.folder}: its scoring cannot be compiled as a whole: that needs fp32 or half-precision tables, "
            "towers of tables and layers, and an interaction of this package"
        )
    if encoder.columns.unseen or bundle.store.ids.kind == "str":
        raise BundleError(
            f"{bundle.folder}: a C++ program cannot serve ids of text, or rows that no training row read"
        )
    try:
        scorer = UserScorer(
            bundle, CandidateScorer(bundle.projection, bundle.projected, compile="off")
        )
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:120]
        raise BundleError(
            f"{bundle.folder}: not compiled: {type(error).__name__}: {first}"
        ) from error
    with whole_folder(out, overwrite=overwrite, mark=CERTIFICATE) as folder:
        shutil.copyfile(scorer.package, folder / _PACKAGE)
        (folder / _INPUTS).write_text("\n".join(_inputs(bundle, scorer)) + "\n")
        program = files("torchrec_ext.retrieval.scorer") / _PROGRAM
        # The source and no binary, because a reader can compile it and see what it
        # does.
        (folder / _PROGRAM).write_text(program.read_text())
        certificate = {
            "bundle": bundle.manifest.digest,
            "greatest_difference": scorer.greatest_difference,
            "torch": torch.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "files": {_PACKAGE: measure_file(folder / _PACKAGE)},
        }
        (folder / CERTIFICATE).write_text(json.dumps(certificate, indent=1) + "\n")
    return certificate


def _inputs(bundle: Bundle, scorer: UserScorer) -> Iterator[str]:
    """Yields a line for each input of the code, in order: a user's columns, then arrays by file, type and offset."""
    for tower in scorer.towers:
        for each in tower.inputs:
            yield f"{'list' if len(each.shape) > 1 else 'column'} {each.name} {each.dtype}"
    tables = [name for tower in scorer.towers for name in tower.table_names]
    arrays = list(scorer.constants)
    # The tables come first among the constants, see compiled_scores().
    for name, table in zip(tables, arrays, strict=False):
        file = bundle.architecture.tables[name]
        yield f"constant {file} {_array(table)[0]} {_offset(bundle.folder / file)} {_array(table)[1]}"
    rows = bundle.projected.folder.relative_to(bundle.folder)
    for file_name, array in zip((ROWS, SCALES), arrays[len(tables) :], strict=False):
        yield f"constant {rows / file_name} {_array(array)[0]} 0 {_array(array)[1]}"
    ids = bundle.store.folder / _IDS
    with ids.open("rb") as stream:
        # For the place where the numbers begin: the program maps the file and knows
        # nothing of numpy.
        np.lib.format.read_magic(stream)
        shape, _, _ = np.lib.format.read_array_header_1_0(stream)
        yield f"ids {ids.relative_to(bundle.folder)} int64 {stream.tell()} {shape[0]}"


def _array(tensor: torch.Tensor) -> tuple[str, str]:
    """Returns the type of a tensor, and its shape in words."""
    return str(tensor.dtype).removeprefix("torch."), " ".join(map(str, tensor.shape))


def _offset(path: Path) -> int:
    """Returns the first byte of the weight in a table's safetensors file."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        begin, _ = json.loads(stream.read(size))["weight"]["data_offsets"]
    return 8 + size + int(begin)
