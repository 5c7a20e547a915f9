"""Scoring compiled to one call of machine code by AOTInductor: query towers, gathered rows and top NN.

For some hundred rows, Python's and torch's overhead would exceed the time of the arithmetic.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.export import Dim, ExportedProgram, export
from torch.func import functional_call

from torchrec_ext.retrieval.bundle import audit as audits
from torchrec_ext.retrieval.bundle.architecture import Int8Table
from torchrec_ext.retrieval.bundle.request_columns import Read
from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.retrieval.onnx.layers import EXPORTABLE, PaddedTower

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

_CHECKED = 8  # audited users whose scores are compared
_EXAMPLE = (
    4  # positions, or ids of a list, in the traced example; the program takes 2 or more
)
# One thread, because a server has a worker for each core. Without the newest
# processor's own instructions, because a cache folder may be shared by machines of one
# capability.
_CONFIG: dict[str, Any] = {"cpp.threads": 1}
if os.uname().machine == "x86_64":
    _CONFIG["cpp.march"] = "x86-64-v3"
# Products by Inductor's own code: for the one row of a user, a call of BLAS takes
# longer than the arithmetic.
_TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}


class CompiledScores:
    """Loaded machine code that scores a user with positions of stored rows; see :func:`compiled_scores`.

    Attributes:
        package: file with the code.
        constants: tables and stored rows, in the order of the code's inputs after user and positions.
    """

    def __init__(self, package: Path, constants: Sequence[Tensor]) -> None:
        self.package = package
        self.constants = constants
        # The loader itself: torch's wrapper flattens trees, which takes longer than a
        # small request.
        self._run = torch._inductor.aoti_load_package(str(package)).loader.run

    def __call__(self, user: list[Tensor], positions: Tensor) -> tuple[Tensor, bool]:
        """Returns (N,) scores, and whether they are unusable: a position out of range, an output not finite.

        Args:
            user: a row of the towers' inputs, or of their outputs, (D1,).
            positions: (N,) int64.
        """
        if len(positions) == 1:  # the program takes 2 or more
            scores, unusable = self._run([*user, positions.repeat(2), *self.constants])
            return scores[:1], bool(unusable)
        scores, unusable = self._run([*user, positions, *self.constants])
        return scores, bool(unusable)


def compiled_scores(
    projection: Projection,
    matrix: Tensor,
    scales: Tensor | None,
    towers: Sequence[PaddedTower] = (),
) -> CompiledScores | None:
    """Compiles the scoring of a user with stored rows.

    The machine code is cached in torch's own cache folder (``TORCHINDUCTOR_CACHE_DIR``) under a digest of operations
    and weights. Other workers, and a restarted server, load it from there, but only if the folder belongs to this user.
    Tables and stored rows are inputs of the code, not parts of it.

    Args:
        projection: projection of the interaction.
        matrix: (I, width) stored rows.
        scales: (I,) scales of int8 rows, or None.
        towers: query towers, whose tables are taken out of them; without any, the function takes their outputs.

    Returns:
        The loaded code. None if the interaction is not projected, because it runs in blocks of its own, and for fewer
        than two rows.

    Raises:
        ValueError: the cache folder is another user's, or others may write to it.
        Exception: any error of torch's compiler.
    """
    if projection.query_inputs is None or len(matrix) < 2:
        return None
    folder = _private_folder(Path(cache_dir()) / "torchrec_ext")
    stored_rows = [matrix] if scales is None else [matrix, scales]
    tables = [tower.take_tables() for tower in towers]
    user, lists = _example(projection, towers)
    rows = Dim("rows", min=2)
    fixed = [[None] * len(each) for each in tables]
    with torch.no_grad():
        program = export(
            _Scores(projection, scales is not None, towers),
            (user, torch.zeros(_EXAMPLE, dtype=torch.int64), tables, stored_rows),
            dynamic_shapes=(
                lists,
                {0: Dim("candidates", min=2)},
                fixed,
                [{0: rows} for _ in stored_rows],
            ),
        )
    path = folder / f"{_key(program)}.pt2"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            package = f"{temporary}/scores.pt2"
            try:
                _compile(program, package, _CONFIG | _TEMPLATES)
            except Exception:
                # Of some products, such as dot products, Inductor has no code.
                _compile(program, package, _CONFIG)
            # Atomic, since several workers may compile the same program.
            os.replace(package, path)
    return CompiledScores(path, [*chain.from_iterable(tables), *stored_rows])


def _compile(program: ExportedProgram, package: str, config: dict[str, Any]) -> None:
    # A copy of the settings, because torch adds its own.
    torch._inductor.aoti_compile_and_package(
        program, package_path=package, inductor_configs=dict(config)
    )


def _example(
    projection: Projection, towers: Sequence[PaddedTower]
) -> tuple[list[Tensor], list[Any]]:
    """Returns the inputs of one user to trace with, and the dynamic shapes of each: lists have any length."""
    if not towers:
        return [torch.zeros(projection.query_inputs or 0)], [None]
    user: list[Tensor] = []
    lists: list[Any] = []
    for tower in towers:
        for each in tower.inputs:
            is_list = len(each.shape) > 1
            user.append(
                torch.zeros(
                    (1, _EXAMPLE) if is_list else (1,), dtype=getattr(torch, each.dtype)
                )
            )
            lists.append({1: Dim(f"length_{len(lists)}", min=2)} if is_list else None)
    return user, lists


class _Scores(nn.Module):
    def __init__(
        self, projection: Projection, scaled: bool, towers: Sequence[PaddedTower]
    ) -> None:
        super().__init__()
        self._projection = projection
        self._scaled = scaled
        self._towers = nn.ModuleList(towers)

    def forward(
        self,
        user: list[Tensor],
        positions: Tensor,
        tables: list[list[Tensor]],
        stored_rows: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        query = user[0]
        if self._towers:
            outputs = []
            for tower, weights in zip(self._towers, tables, strict=True):
                columns = tuple(user[: len(tower.inputs)])  # type: ignore[arg-type]
                user = user[len(columns) :]
                weights_by_name = {
                    f"weights.{index}": weight for index, weight in enumerate(weights)
                }
                outputs.append(functional_call(tower, weights_by_name, columns)[0])
            query = torch.cat(outputs)
        # Clamp wrong positions instead of raising: an exception in an OpenMP thread
        # ends the process.
        inside = positions.clamp(0, stored_rows[0].shape[0] - 1)
        rows = stored_rows[0][inside].float()
        if self._scaled:
            rows = rows * stored_rows[1][inside][:, None]
        unusable = (inside != positions).any() | ~query.isfinite().all()
        return self._projection.score(self._projection.query(query), rows), unusable


class UserScorer:
    """Scores one user's columns with candidates in one compiled call; safe to call from several threads.

    Args:
        bundle: bundle with the towers and the stored rows; :meth:`takes` must be true for it.
        plain: scorer of the towers' outputs, to compare with.

    Attributes:
        towers: query towers, whose inputs are the code's.
        package: file with the code.
        constants: tables and stored rows, in the order of the code's inputs.
        greatest_difference: greatest difference of a score from ``plain``.

    Raises:
        ValueError: as :func:`compiled_scores`, or if the compiled code gives other scores than ``plain``.
        Exception: any error of torch's compiler.
    """

    def __init__(
        self, bundle: Bundle, plain: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        encoder = bundle.encoders[0]
        self.towers = [
            PaddedTower(encoder, name, replaces_unseen=False) for name in bundle.query
        ]
        compiled = compiled_scores(
            bundle.projection,
            bundle.projected.matrix(),
            bundle.projected.scales,
            self.towers,
        )
        assert compiled is not None, "takes() was true"
        self._compiled = compiled
        self.package = compiled.package
        self.constants = compiled.constants
        self.greatest_difference = 0.0
        self._check = bundle.projected.check
        pairs = audits.Audit.open(bundle.folder)[0]
        positions = torch.from_numpy(pairs.positions)
        for number in range(_CHECKED):
            rows = encoder.read(pairs.queries.slice(number, 1).to_pydict())
            expected = plain(encoder.vectors(rows)[0], positions)
            scores = self(rows, positions)
            difference = (
                float("inf")
                if scores is None
                else audits.largest_difference(scores, expected)
            )
            if not difference <= audits.tolerance(expected):
                raise ValueError(
                    f"compiled scores of an audited user differ by {difference:.3g}; report it"
                )
            self.greatest_difference = max(self.greatest_difference, difference)

    @staticmethod
    def takes(bundle: Bundle) -> bool:
        """Returns whether a bundle can be scored like this.

        It cannot if a query tower is a session encoder or a module of your own, or has int8 tables.
        """
        model: Any = bundle.encoders[0].model
        is_int8 = any(isinstance(module, Int8Table) for module in model.modules())
        return not is_int8 and all(
            type(tower).__name__ in EXPORTABLE for tower in model.towers.values()
        )

    def __call__(self, rows: Read, positions: Tensor) -> Tensor | None:
        """Returns (N,) scores of one user's parsed row with positions (N,) int64; None if a number is unusable.

        Raises:
            StoreError: the store's file was cut off.
        """
        # The rows are mapped: a file that was cut off would end the process at the
        # first read.
        self._check()
        user = [column for tower in self.towers for column in tower.row(rows)]
        scores, unusable = self._compiled(user, positions)
        return None if unusable else scores


def _private_folder(folder: Path) -> Path:
    """Creates a folder writable by this user alone, because its files are run and torch's path in /tmp is public."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = os.stat(folder.parent)
    status = os.lstat(folder)
    # With the sticky bit, as /tmp has it, others may write to the parent but not
    # replace this folder.
    replaceable = (
        bool(parent.st_mode & stat.S_IWOTH) and not parent.st_mode & stat.S_ISVTX
    )
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
    digest = hashlib.sha256(
        f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {_CONFIG} {_TEMPLATES}\n{program}".encode()
    )
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
