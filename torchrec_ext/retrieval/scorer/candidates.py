"""compiled_scores(): gathering rows and the network over them as machine code, by AOTInductor.

A call is one call of C++: of a scorer for some hundred rows, what Python does around the arithmetic is the greater part.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.export import Dim, ExportedProgram, export

from torchrec_ext.retrieval.projection import Projection

Compiled = Callable[[Tensor, Tensor], tuple[Tensor, bool]]
_EXAMPLE = 4  # positions, of whose number nothing is assumed but that it is 2 or more


def compiled_scores(projection: Projection, matrix: Tensor, scales: Tensor | None) -> Compiled | None:
    """A function of the query towers' outputs (D1,) and positions (N,): scores (N,), and whether a position is outside.

    The machine code is kept in torch's own cache folder (``TORCHINDUCTOR_CACHE_DIR``) by what it computes and its weights, so that
    other workers, and a service that starts again, load it; from a folder of this user alone.

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
        # Where it is wrong nothing is read outside, and nothing raised: an exception in a thread of OpenMP ends the process.
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
            f"compiled code is not loaded from '{folder}': it is user {about.st_uid}'s with mode {stat.S_IMODE(about.st_mode):o}, "
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
