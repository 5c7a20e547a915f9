"""CandidateScorer: stored rows of given positions, and the top NN over them, in one compiled function.

compiled_scores(): gathering rows and the network over them as machine code, by AOTInductor.

A call is one call of C++: of a scorer for some hundred rows, what Python does around the arithmetic is the greater
part.
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
_EXAMPLE = 4  # positions, of whose number nothing is assumed but that it is 2 or more


def compiled_scores(projection: Projection, matrix: Tensor, scales: Tensor | None) -> Compiled | None:
    """A function of the query towers' outputs (D1,) and positions (N,): scores (N,), and whether a position is outside.

    The machine code is kept in torch's own cache folder (``TORCHINDUCTOR_CACHE_DIR``) by what it computes and its
    weights, so that other workers, and a service that starts again, load it; from a folder of this user alone.

    Args:
        projection: of the interaction.
        matrix: (I, width) stored rows.
        scales: (I,) of rows in 8 bits.

    Returns:
        None where every layer is the pair's, which runs in blocks of its own, and of fewer than two rows.

    Raises:
        ValueError: the cache folder is another user's, or others may write to it.
        Exception: whatever torch raises where it cannot compile.
    """
    if projection.query_inputs is None or len(matrix) < 2:
        return None
    folder = _of_this_user(Path(cache_dir()) / "torchrec_ext")
    stored = [matrix] if scales is None else [matrix, scales]
    example = (torch.zeros(projection.query_inputs), torch.zeros(_EXAMPLE, dtype=torch.int64))
    rows = Dim("rows", min=2)
    with torch.no_grad():
        program = export(
            _Scores(projection, scales is not None),
            (*example, *stored),
            dynamic_shapes=(None, {0: Dim("candidates", min=2)}, tuple({0: rows} for _ in stored)),
        )
    run = torch._inductor.aoti_load_package(str(_package(program, folder))).loader.run

    def scored(query: Tensor, positions: Tensor) -> tuple[Tensor, bool]:
        if len(positions) == 1:
            scores, outside = run([query, positions.repeat(2), *stored])
            return scores[:1], bool(outside)
        scores, outside = run([query, positions, *stored])
        return scores, bool(outside)

    return scored


class _Scores(nn.Module):
    def __init__(self, projection: Projection, scaled: bool) -> None:
        super().__init__()
        self._projection, self._scaled = projection, scaled

    def forward(self, query: Tensor, positions: Tensor, *stored: Tensor) -> tuple[Tensor, Tensor]:
        # Where it is wrong nothing is read outside, and nothing raised: an exception in a thread of OpenMP ends the
        # process.
        places = positions.clamp(0, stored[0].shape[0] - 1)
        rows = stored[0][places].float()
        if self._scaled:
            rows = rows * stored[1][places][:, None]
        return self._projection.score(self._projection.query(query), rows), (places != positions).any()


def _package(program: ExportedProgram, folder: Path) -> Path:
    """The file with the machine code of a program, compiled unless it is there."""
    path = folder / f"{_key(program)}.pt2"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = torch._inductor.aoti_compile_and_package(program, package_path=f"{temporary}/scores.pt2")
            os.replace(made, path)
    return path


def _of_this_user(folder: Path) -> Path:
    """The folder, made where it is missing: what lies in it is run, and anybody can guess the name that torch gives it in /tmp."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    around, own = os.stat(folder.parent), os.lstat(folder)
    _check_owner(folder.parent, around, bool(around.st_mode & stat.S_IWOTH) and not around.st_mode & stat.S_ISVTX)
    _check_owner(folder, own, bool(own.st_mode & (stat.S_IWOTH | stat.S_IWGRP)) or not stat.S_ISDIR(own.st_mode))
    if own.st_uid == os.geteuid():
        folder.chmod(0o700)
    return folder


def _check_owner(folder: Path, about: os.stat_result, shared: bool) -> None:
    if shared or about.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"compiled code is not loaded from '{folder}': it is user {about.st_uid}'s with mode "
            f"{stat.S_IMODE(about.st_mode):o}, "
            f"and must be a folder of user {os.geteuid()} that nobody else writes; remove it, or name another in "
            "TORCHINDUCTOR_CACHE_DIR"
        )


def _key(program: ExportedProgram) -> str:
    """Of all that decides the machine code: operations, weights, torch and the processor."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}\n{program}".encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


Compile = Literal["auto", "off"]


class CandidateScorer:
    """Scores of one query with candidates of a store; of a request nothing else is left to do.

    Rows are read where they lie in the memory-mapped file: compiled, they are gathered, summed with the query's half
    and put through the network in one pass, and no copy of them is written. Without a compiler the same runs operation
    by operation, and a warning says so once. Both are equal within 1e-5. May be called from several threads.

    Args:
        projection: of the interaction.
        store: of what ``projection.candidates`` made of the catalogue.
        compile: ``auto`` or ``off``; compiling takes some 10 seconds here, and is kept on disk: see
            :func:`~torchrec_ext.retrieval.scorer.candidates.compiled_scores`.

    Raises:
        ValueError: a store of another width.
    """

    def __init__(self, projection: Projection, store: EmbeddingStore, *, compile: Compile = "auto") -> None:  # noqa: A002
        if compile not in ("auto", "off"):
            raise ValueError(f"compile={compile!r}: must be auto or off")
        if len(store) and store.width != projection.width:
            raise ValueError(
                f"store: rows are {store.width} wide, the projection's {projection.width}; store "
                "projection.candidates(...)"
            )
        self.projection, self.store = projection, store
        self._matrix, self._scales, self._size = store.matrix(), store.scales, len(store)
        self._buffers = threading.local()
        self._compiled = self._compile() if compile == "auto" else None

    @property
    def compiled(self) -> bool:
        """Whether it runs compiled; an interaction of which nothing can be projected does not."""
        return self._compiled is not None

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """(N,) scores of the query towers' outputs (D1,) with the rows at ``positions`` (N,) int64.

        Raises:
            ValueError: a position outside 0 to I - 1.
            StoreError: the store's file was cut off.
        """
        if not len(positions):
            return torch.empty(0)
        self.store.check()
        if self._compiled is not None:
            scores, outside = self._compiled(query, positions)
            if not outside:
                return scores
        places = positions.numpy()
        if places.view(np.uint64).max() >= self._size:  # where -1 is the greatest of all
            wrong = places[(places < 0) | (places >= self._size)][0]
            raise ValueError(f"positions: {wrong} is not a row of this store, which has {self._size}")
        query = self.projection.query(query)
        if self._matrix.dtype != torch.float32:
            scales = None if self._scales is None else self._scales[positions]
            return self.projection.score(query, decode(self._matrix.index_select(0, positions), scales))
        rows = self._buffer(len(positions))
        torch.index_select(self._matrix, 0, positions, out=rows)
        return self.projection.score(query, rows)

    def _buffer(self, count: int) -> Tensor:
        """Memory of this thread, so that no request waits for pages to be mapped."""
        kept: Tensor | None = getattr(self._buffers, "rows", None)
        if kept is None or len(kept) < count:
            kept = self._buffers.rows = torch.empty(1 << (count - 1).bit_length(), self.store.width)
        return kept[:count]

    def _compile(self) -> Compiled | None:
        try:
            return compiled_scores(self.projection, self._matrix, self._scales)
        except Exception as error:
            first = str(error).strip().splitlines()[0][:400]
            warnings.warn(f"the top NN runs uncompiled: {type(error).__name__}: {first}", stacklevel=3)
            return None
