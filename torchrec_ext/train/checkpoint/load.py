"""load_checkpoint(): a checkpoint into a model under another plan, on other ranks, or with more rows and layers.

match() compares them name by name: what fits, what grew, and what must be allowed or is refused. inherited() moves an
optimizer's number per row between tables whose columns are split differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, get_args

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.train.checkpoint.config import Change
from torchrec_ext.train.checkpoint.folder import CheckpointRanks, read_checkpoint_manifest, read_index
from torchrec_ext.train.checkpoint.state import LoadPlanner, LocalShard, ModelState, Parts, State
from torchrec_ext.train.checkpoint.storage import CheckpointError, cause, reader


@dataclass
class Match:
    """The tensors of a model that a checkpoint fills.

    Args:
        tensors: tensors to be loaded; where a table has more rows than were saved, the saved rows.
        row_states: names of the row states to be loaded.
        grown: tables with more rows, and the number of rows that were saved.
        said: a line for each difference, for the report.
    """

    tensors: State
    row_states: list[str]
    grown: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def match(
    path: str,
    state: ModelState,
    wanted: State,
    index: Metadata,
    saved: Mapping[str, Any],
    allow: Sequence[Change],
    together: CheckpointRanks,
) -> Match:
    """Compares a model with what was saved.

    Args:
        path: name of the checkpoint in messages.
        state: state of the model.
        wanted: the model's tensors without row states.
        index: the checkpoint's index of tensors.
        saved: the checkpoint's manifest.
        allow: the kinds of differences that are allowed.
        together: the ranks that load; all call it.

    Raises:
        CheckpointError: there is a difference of another kind; each is named, on every rank alike.
    """
    there = {name: tuple(getattr(held, "size", ())) for name, held in index.state_dict_metadata.items()}
    mine = {name: tuple(held.size()) for name, held in wanted.items()} | {
        name: (row_state.rows,) for name, row_state in state.row_states.items()
    }
    sizes = {name: (size[:1] if name in state.row_states else size) for name, size in there.items()}
    differences: dict[str, Change | None] = {}
    result = Match({}, [])
    for name, size in mine.items():
        kind = _kind(name, size, sizes.get(name), saved)
        if kind == "more_rows":
            result.grown[name.split(".")[1]] = sizes[name][0]
        if kind != "fits":
            differences[_line(name, size, sizes.get(name))] = kind  # type: ignore[assignment]
        if kind in ("fits", "more_rows"):
            if name in state.row_states:
                result.row_states.append(name)
            else:
                result.tensors[name] = _clipped(wanted[name], sizes[name])
    known = {*mine, *(f"tables.{name}.{slot}" for name in state.tables for slot in _slots(state))}
    for name in there:
        if name.startswith(("tables.", "dense.")) and name not in known:
            gone = "fewer_tables" if name.startswith("tables.") and name.split(".")[1] not in state.tables else None
            differences[f"{name} is not in this model"] = "fewer_layers" if name.startswith("dense.") else gone  # type: ignore[assignment]
    _refuse(path, differences, allow, together, result)
    return result


def _kind(name: str, size: tuple[int, ...], before: tuple[int, ...] | None, saved: Mapping[str, Any]) -> str | None:
    """Returns ``fits``, the name of the change that loading would be, or None for one that nothing allows."""
    if size == before:
        return "fits"
    if name.startswith("tables."):
        if before is None:
            return None if name.split(".")[1] in saved["tables"] else "new_tables"
        return "more_rows" if len(size) and size[0] > before[0] and size[1:] == before[1:] else None
    if before is None and name.startswith("dense."):
        weight = name.partition("@")[0].removeprefix("dense.")
        return None if "@" in name and weight in saved["layers"] else "new_layers"
    return None


def _line(name: str, size: tuple[int, ...], before: tuple[int, ...] | None) -> str:
    return f"{name} was not saved" if before is None else f"{name} is {size} and was saved as {before}"


def _clipped(held: Any, size: tuple[int, ...]) -> Any:
    """The rows of a table that were saved."""
    if not isinstance(held, Parts) or held.size() == size:
        return held
    parts = [LocalShard(shard.tensor[: max(size[0] - shard.offsets[0], 0)], shard.offsets) for shard in held.parts]
    return Parts(size, parts)


def _refuse(
    path: str, differences: dict[str, Change | None], allow: Sequence[Change], together: CheckpointRanks, result: Match
) -> None:
    by_rank = together.gathered(differences)
    everything = {line: kind for lines in by_rank for line, kind in lines.items() if _agreed(line, by_rank)}
    refused = [line for line, kind in everything.items() if kind not in allow]
    result.said = [line for line in everything if line not in refused]
    if refused:
        more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
        kinds = sorted({kind for line, kind in everything.items() if line in refused and kind} & set(get_args(Change)))
        remedy = f"; if that is meant, allow it: start.allow={','.join([*allow, *kinds])}" if kinds else ""
        raise CheckpointError(
            f"checkpoint '{path}' is of another model or optimizer: {'; '.join(refused[:8])}{more}{remedy}"
        )


def _agreed(line: str, by_rank: Sequence[Mapping[str, Any]]) -> bool:
    """A rank that holds no part of a table does not know its names; another one does."""
    return not line.endswith("is not in this model") or all(line in lines for lines in by_rank)


def _slots(state: ModelState) -> set[str]:
    return {name.rpartition(".")[2] for name in [*state.tensors, *state.row_states] if name.startswith("tables.")} | {
        "weight"
    }


def inherited(saved: Tensor, widths: Sequence[int], start: int, stop: int) -> Tensor:
    """Returns the number that a part of the columns inherits: the mean over its columns of each saved part's number.

    A table whose columns are split keeps one sum of squared gradients (their mean over the part's columns) for each
    part. The mean over the parts, weighted by their widths, is the sum that the whole table would have kept for the
    same gradients; a part of a whole, or of another part, starts from the sum of what it was a part of.

    Args:
        saved: numbers of n rows and P saved parts, (n, P).
        widths: number of columns of each saved part, in order.
        start: first column of the part that inherits.
        stop: column after the last of that part.

    Returns:
        (n, 1).

    Example:
        >>> inherited(torch.tensor([[1.0, 3.0]]), (8, 8), 0, 16), inherited(torch.tensor([[1.0, 3.0]]), (8, 8), 8, 12)
        (tensor([[2.]]), tensor([[3.]]))
    """
    ends = list(accumulate(widths))
    shared = [min(stop, end) - max(start, end - width) for width, end in zip(widths, ends, strict=True)]
    weights = torch.tensor([max(columns, 0) for columns in shared], dtype=torch.float64) / (stop - start)
    return (saved.double() @ weights.to(saved.device)).to(saved.dtype).unsqueeze(1)


def load_checkpoint(
    path: str,
    state: ModelState,
    together: CheckpointRanks,
    extra: State | None = None,
    *,
    allow: Sequence[Change] = (),
    cold: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], Match]:
    """Writes a checkpoint into ``state`` and ``extra``, whatever plan and number of ranks it was saved with.

    Args:
        path: checkpoint in which :func:`damage` found nothing.
        state: state of the model and its optimizers.
        together: the ranks that load; all call it.
        extra: tensors to fill as well; names that were not saved are left as they are.
        allow: how the model may differ. ``more_rows``: the rows beyond those saved begin as the saved row of ``cold``,
            without optimizer state. ``new_tables`` and ``new_layers`` stay as they were drawn. ``fewer_tables`` and
            ``fewer_layers`` are left in the checkpoint.
        cold: row of each table that stands for ids never seen; 0 where not given.

    Returns:
        The manifest, and what was matched.

    Raises:
        CheckpointError: the checkpoint was saved from another model; each difference is named.
    """
    saved, index = read_checkpoint_manifest(path), read_index(path)
    counted = state.counted()
    matched = match(path, state, {**state.tensors, **counted}, index, saved, allow, together)
    wanted = {**matched.tensors, **{n: held for n, held in (extra or {}).items() if n in index.state_dict_metadata}}
    other: dict[str, Parts] = {}
    for name in matched.row_states:
        row_state, widths = state.row_states[name], saved["row_parts"][name]
        rows = matched.grown.get(name.split(".")[1], row_state.rows)
        parts = [
            LocalShard(shard.tensor[: max(rows - shard.offsets[0], 0)], shard.offsets) for shard in row_state.parts
        ]
        if tuple(widths) == row_state.widths:
            wanted[name] = Parts((rows, len(widths)), parts)
        else:
            lengths = {shard.offsets[0]: len(shard.tensor) for shard in parts}
            made = [LocalShard(torch.empty(length, len(widths)), (row, 0)) for row, length in lengths.items()]
            other[name] = Parts((rows, len(widths)), made)
    cold_rows = _cold_rows(state, matched, cold or {})
    _read(path, {**wanted, **other}, together)
    if cold_rows:
        # Apart: one name has one shape in a load, and these are whole rows where the table may be split.
        _read(path, cold_rows, together)
    state.count(counted)
    _merge(state, other, saved)
    _grow(state, matched, cold_rows)
    return saved, matched


def load_weights(path: str, state: ModelState, together: CheckpointRanks) -> None:
    """Writes the weights of a checkpoint, without optimizer state, into the model it was saved from, under any plan.

    Args:
        path: checkpoint in which :func:`damage` found nothing.
        state: state of the model alone.
        together: the ranks that load; all call it.
    """
    _read(path, state.tensors, together)


def _read(path: str, wanted: State, together: CheckpointRanks) -> None:
    group = together.group
    try:
        dcp.load(wanted, storage_reader=reader(path), planner=LoadPlanner(), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint '{path}' could not be read: {cause(error)}") from None


def _merge(state: ModelState, other: Mapping[str, Parts], saved: Mapping[str, Any]) -> None:
    """Converts row states of tables whose columns are split differently."""
    for name, held in other.items():
        row_state, widths = state.row_states[name], saved["row_parts"][name]
        by_row = {shard.offsets[0]: shard.tensor for shard in held.parts}
        for shard in row_state.parts:
            row, number = shard.offsets
            start = sum(row_state.widths[:number])
            if row in by_row:
                merged = inherited(by_row[row], widths, start, start + row_state.widths[number])
                shard.tensor[: len(merged)].copy_(merged)


def _cold_rows(state: ModelState, matched: Match, cold: Mapping[str, int]) -> dict[str, Any]:
    """Allocates, on every rank, the row as which each grown table's new rows begin."""
    rows: dict[str, Any] = {}
    for table, before in matched.grown.items():
        dim = state.tables[table][1]
        rows[f"tables.{table}.weight"] = Parts(
            (before, dim), [LocalShard(torch.empty(1, dim), (cold.get(table, 0), 0))]
        )
    return rows


@torch.no_grad()
def _grow(state: ModelState, matched: Match, cold_rows: Mapping[str, Parts]) -> None:
    for name, held in {**state.tensors, **state.row_states}.items():
        parts = getattr(held, "parts", None)
        table = name.split(".")[1] if name.startswith("tables.") else ""
        if table not in matched.grown or parts is None:
            continue
        row = cold_rows[name].parts[0].tensor if name in cold_rows else None
        for shard in parts:
            _fill(shard.tensor[max(matched.grown[table] - shard.offsets[0], 0) :], row, shard.offsets[1])


def _fill(rows: Tensor, cold: Tensor | None, column: int) -> None:
    if cold is None:
        rows.zero_()
    else:
        rows.copy_(cold[:, column : column + rows.shape[1]].expand(len(rows), -1))
