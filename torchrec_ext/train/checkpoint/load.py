"""load_checkpoint(): loads a checkpoint under another plan, on other ranks, or with more rows and layers.

match() compares names and shapes: tensors that fit, tables that grew, and differences to allow or refuse. inherited()
converts an optimizer's numbers per row between different splits of a table's columns.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any, get_args

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_ext.train.checkpoint.config import Change
from torchrec_ext.train.checkpoint.folder import (
    CheckpointRanks,
    read_checkpoint_manifest,
    read_index,
)
from torchrec_ext.train.checkpoint.state import (
    LoadPlanner,
    LocalShard,
    ModelState,
    Parts,
    State,
    table_in_name,
)
from torchrec_ext.train.checkpoint.storage import CheckpointError, cause, reader

# A kind of difference that no setting allows: without dynamic ids it is not known which
# rows would go.
_LOST_ROWS = "lost_rows"
# Rows of a larger table that are read at once.
_MOST_ROWS = 2**18
# Characters of a message.
_MOST_CHARACTERS = 200


@dataclass
class Match:
    """The tensors of a model to load from a checkpoint.

    Args:
        tensors: tensors to load; of a table with new rows, only the saved rows.
        row_states: names of the row states to load.
        grown: tables with new rows, and their saved number of rows.
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
    sources: Container[str] = (),
) -> Match:
    """Compares a model with a checkpoint.

    Args:
        path: name of the checkpoint in messages.
        state: state of the model.
        wanted: the model's tensors without row states.
        index: the checkpoint's index of tensors.
        saved: the checkpoint's manifest.
        allow: the kinds of differences to allow.
        together: the ranks that load; all call it.
        sources: tables that may have fewer rows.

    Raises:
        CheckpointError: there is a difference of another kind; the first are named, on every rank alike.
    """
    saved_shapes = {
        name: tuple(getattr(value, "size", ()))
        for name, value in index.state_dict_metadata.items()
    }
    model_sizes: dict[str, tuple[int, ...]] = {
        name: tuple(value.size()) for name, value in wanted.items()
    }
    saved_sizes = dict(saved_shapes)
    # Only the rows of a row state must fit: its columns depend on the split of the
    # table, which may differ.
    for name, row_state in state.row_states.items():
        model_sizes[name] = (row_state.rows,)
        if name in saved_sizes:
            saved_sizes[name] = saved_sizes[name][:1]
    differences: dict[str, str | None] = {}
    result = Match({}, [])
    for name, size in model_sizes.items():
        kind = _kind(name, size, saved_sizes.get(name), saved, sources)
        if kind == "more_rows":
            result.grown[table_in_name(name)] = saved_sizes[name][0]
        if kind != "fits":
            differences[_line(name, size, saved_sizes.get(name))] = kind
        if kind in ("fits", "more_rows"):
            if name in state.row_states:
                result.row_states.append(name)
            else:
                result.tensors[name] = _clip_rows(wanted[name], saved_sizes[name])
    # A rank without a shard of a table has no tensors of it, so the names come from the
    # tables' configs.
    model_names = set(model_sizes)
    for table, slot in product(state.tables, _slots(state)):
        model_names.add(f"tables.{table}.{slot}")
    for name in saved_shapes:
        if name in model_names:
            continue
        line = f"{name} is not in this model"
        table = table_in_name(name)
        if name.startswith("dense."):
            differences[line] = "fewer_layers"
        elif table and table not in state.tables:
            differences[line] = "fewer_tables"
        # The table is there, but its optimizer keeps another state.
        elif table:
            differences[line] = None
    _refuse(path, differences, allow, together, result)
    return result


def _kind(
    name: str,
    size: tuple[int, ...],
    before: tuple[int, ...] | None,
    saved: Mapping[str, Any],
    sources: Container[str],
) -> str | None:
    """Returns ``fits``, the kind of change that ``allow`` must name, else a change nothing can allow."""
    if size == before:
        return "fits"
    table = table_in_name(name)
    if table:
        if before is None:
            # The state of a saved table under another optimizer: no setting makes it
            # up.
            if table in saved["tables"]:
                return None
            return "new_tables"
        if not size or size[0] == before[0] or size[1:] != before[1:]:
            return None
        if size[0] > before[0]:
            return "more_rows"
        if table in sources:
            return "fewer_rows"
        return _LOST_ROWS
    if before is None and name.startswith("dense."):
        weight, at, _ = name.removeprefix("dense.").partition("@")
        if not at or weight not in saved["layers"]:
            return "new_layers"
    return None


def _line(name: str, size: tuple[int, ...], before: tuple[int, ...] | None) -> str:
    if before is None:
        return f"{name} was not saved"
    return f"{name} is {size}, saved as {before}"


def _clip_rows(value: Any, size: tuple[int, ...]) -> Any:
    """Clips a table to its saved rows; other tensors are returned unchanged."""
    if not isinstance(value, Parts) or value.size() == size:
        return value
    return Parts(size, _saved_rows(value.parts, size[0]))


def _saved_rows(shards: Sequence[LocalShard], rows: int) -> list[LocalShard]:
    """Returns the saved rows of shards, which are among a table's first ``rows``."""
    return [
        LocalShard(shard.tensor[: max(rows - shard.offsets[0], 0)], shard.offsets)
        for shard in shards
    ]


def _refuse(
    path: str,
    differences: dict[str, str | None],
    allow: Sequence[Change],
    together: CheckpointRanks,
    result: Match,
) -> None:
    by_rank = together.gathered(differences)
    # Every rank refuses the same differences: if only one raised, the others would wait
    # for it in the load.
    everything: dict[str, str | None] = {}
    for lines in by_rank:
        everything |= lines
    refused = []
    refused_kinds = set()
    for line, kind in everything.items():
        if not _on_all_ranks(line, by_rank):
            continue
        if kind in allow:
            result.said.append(line)
        else:
            refused.append(line)
            refused_kinds.add(kind)
    if refused:
        # Only differences that the user may allow are part of the remedy.
        kinds = sorted(set(get_args(Change)) & refused_kinds)
        remedy = ""
        if _LOST_ROWS in refused_kinds:
            remedy = "; a table may only grow: give it the saved number of rows or more"
        elif kinds:
            # A recipe has the key, a loop of one's own calls Checkpointer.load.
            remedy = f"; if meant: start.allow={','.join([*allow, *kinds])}, or load(allow=...)"
        name = path.rstrip("/").rpartition("/")[2]
        header = f"checkpoint '{name}' is of another model: "
        raise CheckpointError(
            header
            + _fitting(refused, _MOST_CHARACTERS - len(header) - len(remedy))
            + remedy
        )


def _fitting(lines: Sequence[str], room: int) -> str:
    """Joins the first lines that fit into ``room`` characters, at least one, and counts the others."""
    text = ""
    for count in range(min(len(lines), 8), 0, -1):
        text = "; ".join(lines[:count])
        if count < len(lines):
            text += f"; and {len(lines) - count} more"
        if len(text) <= room:
            break
    return text


def _on_all_ranks(line: str, by_rank: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a difference counts: a rank without a part of a table may miss its names, so all ranks must."""
    return not line.endswith("is not in this model") or all(
        line in lines for lines in by_rank
    )


def _slots(state: ModelState) -> set[str]:
    slots = {"weight"}
    for name in (*state.tensors, *state.row_states):
        if name.startswith("tables."):
            slots.add(name.rpartition(".")[2])
    return slots


def inherited(saved: Tensor, widths: Sequence[int], start: int, stop: int) -> Tensor:
    """Computes the optimizer's numbers for a part of the columns: the mean of the saved numbers over its columns.

    A table with split columns keeps one sum of squared gradients per part (their mean over the part's columns). The
    mean over the parts, weighted by their widths, is the sum of the unsplit table for the same gradients. A part of the
    table, or of another part, starts from the sum of the part that contained it.

    Args:
        saved: numbers of n rows and P saved parts, (n, P).
        widths: number of columns of each saved part, in order.
        start: first column of the new part.
        stop: column after its last.

    Returns:
        (n, 1).

    Example:
        >>> inherited(torch.tensor([[1.0, 3.0]]), (8, 8), 0, 16), inherited(torch.tensor([[1.0, 3.0]]), (8, 8), 8, 12)
        (tensor([[2.]]), tensor([[3.]]))
    """
    shared = []
    for width, end in zip(widths, accumulate(widths), strict=True):
        columns = min(stop, end) - max(start, end - width)
        # Below 0 for a saved part that lies beside the new one.
        shared.append(max(columns, 0))
    weights = torch.tensor(shared, dtype=torch.float64) / (stop - start)
    return (saved.double() @ weights.to(saved.device)).to(saved.dtype).unsqueeze(1)


def load_checkpoint(
    path: str,
    state: ModelState,
    together: CheckpointRanks,
    extra: State | None = None,
    *,
    allow: Sequence[Change] = (),
    cold: Mapping[str, int] | None = None,
    sources: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Any], Match]:
    """Loads a checkpoint into ``state`` and ``extra``, saved under any plan and number of ranks.

    Args:
        path: checkpoint in which :func:`damage` found nothing.
        state: state of the model and its optimizers.
        together: the ranks that load; all call it.
        extra: further tensors to load; names without a saved tensor are left unchanged.
        allow: how the model may differ. ``more_rows``: new rows begin as the saved row of ``cold``, without optimizer
            state. ``fewer_rows`` is for the tables of ``sources``. ``new_tables`` and ``new_layers`` keep their
            initial values. ``fewer_tables`` and ``fewer_layers`` are not loaded.
        cold: row of each table for unseen ids; 0 by default.
        sources: the saved row of each row of a table that has fewer now, (rows,) int64, see :func:`ids.resized`.

    Returns:
        The manifest, and the match.

    Raises:
        CheckpointError: the checkpoint was saved from another model; the first differences are named.
    """
    saved = read_checkpoint_manifest(path)
    index = read_index(path)
    step_counts = state.counted()
    sources = sources or {}
    matched = match(
        path,
        state,
        {**state.tensors, **step_counts},
        index,
        saved,
        allow,
        together,
        sources,
    )
    to_load = dict(matched.tensors)
    for name, tensor in (extra or {}).items():
        if name in index.state_dict_metadata:
            to_load[name] = tensor
    other_splits: dict[str, Parts] = {}
    for name in matched.row_states:
        row_state = state.row_states[name]
        widths = saved["row_parts"][name]
        rows = matched.grown.get(table_in_name(name), row_state.rows)
        parts = _saved_rows(row_state.parts, rows)
        # With the same split of the columns the load is in place, without a conversion.
        if tuple(widths) == row_state.widths:
            to_load[name] = Parts((rows, len(widths)), parts)
        else:
            # Parts of this rank with the same rows share a buffer, which has all saved
            # columns.
            buffers = {}
            for shard in parts:
                row = shard.offsets[0]
                buffers[row] = LocalShard(
                    torch.empty(len(shard.tensor), len(widths)), (row, 0)
                )
            other_splits[name] = Parts((rows, len(widths)), list(buffers.values()))
    cold_rows = _cold_rows(state, matched, cold or {})
    load_tensors(path, {**to_load, **other_splits}, together)
    if cold_rows:
        # A load of its own: a name has one shape in a load, and these are full rows
        # even if the table is split.
        load_tensors(path, cold_rows, together)
    # Kernels have counters, not tensors: the load filled copies.
    state.count(step_counts)
    _merge(state, other_splits, saved)
    _grow(state, matched, cold_rows)
    for name, metadata in index.state_dict_metadata.items():
        table = table_in_name(name)
        size = getattr(metadata, "size", ())
        # A count of steps has no rows to move.
        if table in sources and len(size) == 2:
            _load_moved(
                path,
                state,
                name,
                size,
                sources[table],
                saved["row_parts"].get(name, ()),
                together,
            )
    return saved, matched


def empty_tensors(index: Metadata, prefixes: Sequence[str]) -> State:
    """Returns a tensor to load into for each of a checkpoint's whose name begins so."""
    tensors: State = {}
    for name, metadata in index.state_dict_metadata.items():
        if name.startswith(tuple(prefixes)) and isinstance(
            metadata, TensorStorageMetadata
        ):
            tensors[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    return tensors


def load_tensors(path: str, tensors: State, together: CheckpointRanks) -> None:
    """Loads tensors of a checkpoint by name; all ranks call it."""
    group = together.group
    try:
        dcp.load(
            tensors,
            storage_reader=reader(path),
            planner=LoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise CheckpointError(
            f"checkpoint '{path}' could not be read: {cause(error)}"
        ) from None


def _merge(
    state: ModelState, other_splits: Mapping[str, Parts], saved: Mapping[str, Any]
) -> None:
    """Converts row states between different splits of a table's columns."""
    for name, saved_parts in other_splits.items():
        row_state = state.row_states[name]
        widths = saved["row_parts"][name]
        by_row = {shard.offsets[0]: shard.tensor for shard in saved_parts.parts}
        for shard in row_state.parts:
            row, number = shard.offsets
            start = sum(row_state.widths[:number])
            if row in by_row:
                merged = inherited(
                    by_row[row], widths, start, start + row_state.widths[number]
                )
                shard.tensor[: len(merged)].copy_(merged)


@torch.no_grad()
def _load_moved(
    path: str,
    state: ModelState,
    name: str,
    size: Sequence[int],
    source: Tensor,
    widths: Sequence[int],
    together: CheckpointRanks,
) -> None:
    """Loads the rows that stay of a larger table, weights or an optimizer's state; rows without an id become 0.

    Saved rows may go to any rank, so each reads them all, in blocks.
    """
    row_state = state.row_states.get(name)
    # A rank without a shard of the table has no tensor of it, and takes part all the
    # same.
    parts = getattr(row_state or state.tensors.get(name), "parts", [])
    for shard in parts:
        shard.tensor.zero_()
    for start in range(0, size[0], _MOST_ROWS):
        count = min(_MOST_ROWS, size[0] - start)
        # By their first column: shards with the same columns read the same rows.
        blocks: dict[int, Tensor] = {}
        for shard in parts:
            column = shard.offsets[1]
            width = shard.tensor.shape[1]
            # A row state needs the numbers of all saved parts of a row.
            if row_state:
                column = 0
                width = size[1]
            blocks.setdefault(
                column, torch.empty(count, width, dtype=shard.tensor.dtype)
            )
        pieces = [
            LocalShard(block, (start, column)) for column, block in blocks.items()
        ]
        load_tensors(path, {name: Parts(size, pieces)}, together)
        for shard in parts:
            row, part = shard.offsets
            places = source[row : row + len(shard.tensor)] - start
            is_here = (places >= 0) & (places < count)
            if row_state:
                first = sum(row_state.widths[:part])
                rows = inherited(
                    blocks[0][places[is_here]],
                    widths,
                    first,
                    first + row_state.widths[part],
                )
            else:
                rows = blocks[part][places[is_here]]
            shard.tensor[is_here.to(shard.tensor.device)] = rows.to(shard.tensor)


def _cold_rows(
    state: ModelState, matched: Match, cold: Mapping[str, int]
) -> dict[str, Any]:
    """Allocates, on every rank, the initial value of each grown table's new rows."""
    rows: dict[str, Any] = {}
    for table, before in matched.grown.items():
        dim = state.tables[table][1]
        row = LocalShard(torch.empty(1, dim), (cold.get(table, 0), 0))
        rows[f"tables.{table}.weight"] = Parts((before, dim), [row])
    return rows


@torch.no_grad()
def _grow(state: ModelState, matched: Match, cold_rows: Mapping[str, Parts]) -> None:
    for name, value in {**state.tensors, **state.row_states}.items():
        parts = getattr(value, "parts", None)
        table = table_in_name(name)
        if table not in matched.grown or parts is None:
            continue
        # Optimizer state has no row for unseen ids: it begins at 0.
        row = None
        if name in cold_rows:
            row = cold_rows[name].parts[0].tensor
        for shard in parts:
            saved_rows = max(matched.grown[table] - shard.offsets[0], 0)
            _fill(shard.tensor[saved_rows:], row, shard.offsets[1])


def _fill(rows: Tensor, cold: Tensor | None, column: int) -> None:
    if cold is None:
        rows.zero_()
    else:
        rows.copy_(cold[:, column : column + rows.shape[1]].expand(len(rows), -1))
