"""load(): a checkpoint into a model under another plan, on other ranks, or with more to it than there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_ext.train.checkpoint.matching import Change, Match, match
from torchrec_ext.train.checkpoint.parts import LoadPlanner, Part, Parts, State
from torchrec_ext.train.checkpoint.reading import read_index, read_manifest
from torchrec_ext.train.checkpoint.row_parts import inherited
from torchrec_ext.train.checkpoint.state import ModelState
from torchrec_ext.train.checkpoint.storage import CheckpointError, cause, reader
from torchrec_ext.train.checkpoint.together import Together


def load(
    path: str,
    state: ModelState,
    together: Together,
    extra: State | None = None,
    *,
    allow: Sequence[Change] = (),
    cold: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], Match]:
    """Writes a checkpoint into the tensors of ``state`` and ``extra``, whatever plan and number of ranks it was saved with.

    Args:
        path: of a checkpoint in which :func:`damage` found nothing.
        state: of the model and its optimizers.
        together: all ranks call it.
        extra: tensors to fill as well; names that were not saved are left as they are.
        allow: how the model may differ. ``more_rows``: the rows beyond those saved begin as the saved row of ``cold``, without
            optimizer state. ``new_tables`` and ``new_layers`` stay as they were drawn. ``fewer_tables`` and ``fewer_layers`` are
            left in the checkpoint.
        cold: by table the row that stands for ids never seen; 0 where not given.

    Returns:
        The manifest, and what was matched.

    Raises:
        CheckpointError: it is of another model; every difference is named.
    """
    saved, index = read_manifest(path), read_index(path)
    counted = state.counted()
    found = match(path, state, {**state.tensors, **counted}, index, saved, allow, together)
    wanted = {**found.tensors, **{n: held for n, held in (extra or {}).items() if n in index.state_dict_metadata}}
    other: dict[str, Parts] = {}
    for name in found.row_states:
        own, widths = state.row_states[name], saved["row_parts"][name]
        rows = found.grown.get(name.split(".")[1], own.rows)
        parts = [Part(part.tensor[: max(rows - part.offsets[0], 0)], part.offsets) for part in own.parts]
        if tuple(widths) == own.widths:
            wanted[name] = Parts((rows, len(widths)), parts)
        else:
            lengths = {part.offsets[0]: len(part.tensor) for part in parts}
            made = [Part(torch.empty(length, len(widths)), (row, 0)) for row, length in lengths.items()]
            other[name] = Parts((rows, len(widths)), made)
    cold_rows = _cold_rows(state, found, cold or {})
    _read(path, {**wanted, **other}, together)
    if cold_rows:
        # Apart: one name has one shape in a load, and these are whole rows where the table may be split.
        _read(path, cold_rows, together)
    state.count(counted)
    _merge(state, other, saved)
    _grow(state, found, cold_rows)
    return saved, found


def load_weights(path: str, state: ModelState, together: Together) -> None:
    """Writes the weights of a checkpoint into the very model that it is of, under any plan, and leaves the optimizers' state there.

    Args:
        path: of a checkpoint in which :func:`damage` found nothing.
        state: of the model alone.
        together: all ranks call it.
    """
    _read(path, state.tensors, together)


def _read(path: str, wanted: State, together: Together) -> None:
    group = together.group
    try:
        dcp.load(wanted, storage_reader=reader(path), planner=LoadPlanner(), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint '{path}' could not be read: {cause(error)}") from None


def _merge(state: ModelState, other: Mapping[str, Parts], saved: Mapping[str, Any]) -> None:
    """Row states of tables whose columns are split differently."""
    for name, held in other.items():
        own, widths = state.row_states[name], saved["row_parts"][name]
        by_row = {part.offsets[0]: part.tensor for part in held.parts}
        for part in own.parts:
            row, number = part.offsets
            start = sum(own.widths[:number])
            if row in by_row:
                merged = inherited(by_row[row], widths, start, start + own.widths[number])
                part.tensor[: len(merged)].copy_(merged)


def _cold_rows(state: ModelState, found: Match, cold: Mapping[str, int]) -> dict[str, Any]:
    """A place for the row by which each grown table's new rows begin, on every rank."""
    rows: dict[str, Any] = {}
    for table, before in found.grown.items():
        dim = state.tables[table][1]
        rows[f"tables.{table}.weight"] = Parts((before, dim), [Part(torch.empty(1, dim), (cold.get(table, 0), 0))])
    return rows


@torch.no_grad()
def _grow(state: ModelState, found: Match, cold_rows: Mapping[str, Parts]) -> None:
    for name, held in {**state.tensors, **state.row_states}.items():
        parts = getattr(held, "parts", None)
        table = name.split(".")[1] if name.startswith("tables.") else ""
        if table not in found.grown or parts is None:
            continue
        row = cold_rows[name].parts[0].tensor if name in cold_rows else None
        for part in parts:
            _fill(part.tensor[max(found.grown[table] - part.offsets[0], 0) :], row, part.offsets[1])


def _fill(rows: Tensor, cold: Tensor | None, column: int) -> None:
    if cold is None:
        rows.zero_()
    else:
        rows.copy_(cold[:, column : column + rows.shape[1]].expand(len(rows), -1))
