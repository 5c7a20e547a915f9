"""CandidateScorer: gathers stored rows and runs the top NN over them, compiled to one C++ call by AOTInductor.

For some hundred rows, Python's overhead would exceed the time of the arithmetic.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch._inductor
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.export import Dim, ExportedProgram, export

from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.retrieval.store.row_formats import decode
from torchrec_ext.retrieval.store.store import EmbeddingStore

Compiled = Callable[[Tensor, Tensor], tuple[Tensor, bool]]
_EXAMPLE = 4  # positions in the traced example; the program takes 2 or more


def compiled_scores(projection: Projection, matrix: Tensor, scales: Tensor | None) -> Compiled | None:
    """Compiles the scoring of a query with stored rows.

    The machine code is cached in torch's own cache folder (``TORCHINDUCTOR_CACHE_DIR``) under a digest of operations
    and weights. Other workers, and a restarted server, load it from there, but only if the folder belongs to this user.

    Args:
        projection: projection of the interaction.
        matrix: (I, width) stored rows.
        scales: (I,) scales of int8 rows, or None.

    Returns:
        A function from the query towers' outputs (D1,) and positions (N,) to scores (N,) and whether a position is out
        of range. None if the interaction is not projected, because it runs in blocks of its own, and for fewer than
        two rows.

    Raises:
        ValueError: the cache folder is another user's, or others may write to it.
        Exception: any error of torch's compiler.
    """
    if projection.query_inputs is None or len(matrix) < 2:
        return None
    folder = _private_folder(Path(cache_dir()) / "torchrec_ext")
    stored_rows = [matrix] if scales is None else [matrix, scales]
    example = (torch.zeros(projection.query_inputs), torch.zeros(_EXAMPLE, dtype=torch.int64))
    rows = Dim("rows", min=2)
    with torch.no_grad():
        program = export(
            _Scores(projection, scales is not None),
            (*example, *stored_rows),
            dynamic_shapes=(None, {0: Dim("candidates", min=2)}, tuple({0: rows} for _ in stored_rows)),
        )
    run = torch._inductor.aoti_load_package(str(_package(program, folder))).loader.run

    def score(query: Tensor, positions: Tensor) -> tuple[Tensor, bool]:
        if len(positions) == 1:  # the program takes 2 or more
            scores, outside = run([query, positions.repeat(2), *stored_rows])
            return scores[:1], bool(outside)
        scores, outside = run([query, positions, *stored_rows])
        return scores, bool(outside)

    return score


class _Scores(nn.Module):
    def __init__(self, projection: Projection, scaled: bool) -> None:
        super().__init__()
        self._projection = projection
        self._scaled = scaled

    def forward(self, query: Tensor, positions: Tensor, *stored_rows: Tensor) -> tuple[Tensor, Tensor]:
        # Clamp wrong positions instead of raising: an exception in an OpenMP thread ends the process.
        inside = positions.clamp(0, stored_rows[0].shape[0] - 1)
        rows = stored_rows[0][inside].float()
        if self._scaled:
            rows = rows * stored_rows[1][inside][:, None]
        return self._projection.score(self._projection.query(query), rows), (inside != positions).any()


def _package(program: ExportedProgram, folder: Path) -> Path:
    """Returns the file with a program's machine code; compiles it if the file is missing."""
    path = folder / f"{_key(program)}.pt2"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            package = torch._inductor.aoti_compile_and_package(program, package_path=f"{temporary}/scores.pt2")
            # Atomic, since several workers may compile the same program.
            os.replace(package, path)
    return path


def _private_folder(folder: Path) -> Path:
    """Creates a folder writable by this user alone, because its files are run and torch's path in /tmp is public."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = os.stat(folder.parent)
    status = os.lstat(folder)
    # With the sticky bit, as /tmp has it, others may write to the parent but not replace this folder.
    replaceable = bool(parent.st_mode & stat.S_IWOTH) and not parent.st_mode & stat.S_ISVTX
    _check_owner(folder.parent, parent, replaceable)
    open_to_others = bool(status.st_mode & (stat.S_IWOTH | stat.S_IWGRP))
    _check_owner(folder, status, open_to_others or not stat.S_ISDIR(status.st_mode))
    if status.st_uid == os.geteuid():
        folder.chmod(0o700)
    return folder


def _check_owner(folder: Path, status: os.stat_result, is_unsafe: bool) -> None:
    if is_unsafe or status.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"compiled code is not loaded from '{folder}', user {status.st_uid}'s with mode "
            f"{stat.S_IMODE(status.st_mode):o}: only user {os.geteuid()} must own and write it; remove it, or name "
            "another in TORCHINDUCTOR_CACHE_DIR"
        )


def _key(program: ExportedProgram) -> str:
    """Returns a digest of everything in the machine code: operations, weights, torch and the processor."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}\n{program}".encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


ScoreCompile = Literal["auto", "off"]


class CandidateScorer:
    """Scores one query with candidates of a store; safe to call from several threads.

    The constructor reads the rows of the memory-mapped file into memory. Compiled code gathers rows, adds the query's
    half and runs the network in one pass, without writing a copy of the rows. Without a compiler the same runs
    operation by operation, and a warning says so once. Both are equal within 1e-5.

    Args:
        projection: projection of the interaction.
        store: store of the catalogue's ``projection.candidates(...)``.
        compile: ``auto`` or ``off``; compiling takes some 10 seconds, and the result is cached on disk: see
            :func:`~torchrec_ext.retrieval.scorer.candidates.compiled_scores`.

    Attributes:
        populated: whether the rows were read into memory; see
            :meth:`~torchrec_ext.retrieval.store.store.EmbeddingStore.populate`.

    Raises:
        ValueError: the store has another width.
    """

    def __init__(self, projection: Projection, store: EmbeddingStore, *, compile: ScoreCompile = "auto") -> None:  # noqa: A002
        if compile not in ("auto", "off"):
            raise ValueError(f"compile={compile!r}: must be auto or off")
        if len(store) and store.width != projection.width:
            raise ValueError(
                f"store: rows are {store.width} wide, the projection's {projection.width}; store "
                "projection.candidates(...)"
            )
        self.projection = projection
        self.store = store
        self._matrix = store.matrix()
        self._scales = store.scales
        self._size = len(store)
        self._buffers = threading.local()
        self.populated = store.populate()
        self._compiled = self._compile() if compile == "auto" else None

    @property
    def compiled(self) -> bool:
        """Whether scoring runs compiled; it never does for an interaction without a projection."""
        return self._compiled is not None

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """Returns (N,) scores of the query towers' outputs (D1,) with the rows at ``positions`` (N,) int64.

        Raises:
            ValueError: a position is outside 0 to I - 1.
            StoreError: the store's file was cut off.
        """
        if not len(positions):
            return torch.empty(0)
        self.store.check()
        if self._compiled is not None:
            scores, outside = self._compiled(query, positions)
            if not outside:
                return scores
            # The compiled code clamps wrong positions; the checks below raise for them.
        rows_wanted = positions.numpy()
        # As unsigned numbers, negative positions are the greatest.
        if rows_wanted.view(np.uint64).max() >= self._size:
            wrong = rows_wanted[(rows_wanted < 0) | (rows_wanted >= self._size)][0]
            raise ValueError(f"positions: {wrong} is not a row of this store, which has {self._size}")
        query = self.projection.query_of_one(query)
        if self._matrix.dtype != torch.float32:
            scales = None if self._scales is None else self._scales[positions]
            return self.projection.score(query, decode(self._matrix.index_select(0, positions), scales))
        rows = self._buffer(len(positions))
        torch.index_select(self._matrix, 0, positions, out=rows)
        return self.projection.score_in_place(query, rows)

    def _buffer(self, count: int) -> Tensor:
        """Returns this thread's reusable buffer for rows: mapping fresh pages would delay each request."""
        buffer: Tensor | None = getattr(self._buffers, "rows", None)
        if buffer is None or len(buffer) < count:
            # Rounded up to a power of two, so that the buffer seldom has to grow.
            buffer = self._buffers.rows = torch.empty(1 << (count - 1).bit_length(), self.store.width)
        return buffer[:count]

    def _compile(self) -> Compiled | None:
        try:
            return compiled_scores(self.projection, self._matrix, self._scales)
        except Exception as error:
            first = str(error).strip().splitlines()[0][:400]
            warnings.warn(f"the top NN runs uncompiled: {type(error).__name__}: {first}", stacklevel=3)
            return None
