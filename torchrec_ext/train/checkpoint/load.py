"""load_checkpoint(): loads a checkpoint under another plan, on other ranks, or with more rows and layers.

match() compares names and shapes: tensors that fit, tables that grew, and other differences.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_ext.train.checkpoint.folder import (
    CheckpointRanks,
    Saved,
)
from torchrec_ext.train.checkpoint.state import (
    CONTENT,
    LoadPlanner,
    LocalShard,
    ModelState,
    Parts,
    State,
    column_widths,
    content_of_json,
    table_in_name,
)
from torchrec_ext.train.checkpoint.storage import CheckpointError, Reader, cause

# Characters of a message.
_MOST_CHARACTERS = 200
Size = tuple[int, ...]


class Match(NamedTuple):
    """The tensors of a model to load from a checkpoint.

    Args:
        tensors: tensors to load; of a table with new rows, only the saved rows.
        grown: tables with new rows, and their saved number of rows.
        said: a line for each difference, for the report.
    """

    tensors: State
    grown: dict[str, int]
    said: list[str]


def match(
    saved: Saved,
    state: ModelState,
    wanted: State,
    partial: bool,
    together: CheckpointRanks,
) -> Match:
    """Compares a model with a checkpoint.

    Args:
        saved: the checkpoint.
        state: state of the model.
        wanted: the model's tensors.
        partial: whether tables may have grown, and tables and layers be new or left out.
        together: the ranks that load; all call it.

    Raises:
        CheckpointError: there is another difference; the first are named, on every rank alike.
    """
    sizes_then: dict[str, Size] = {
        name: tuple(getattr(value, "size", ()))
        for name, value in saved.index.state_dict_metadata.items()
    }
    sizes: dict[str, Size] = {}
    # A rank without a shard of a table has no tensors of it, so all ranks compare all names.
    for of_rank in together.gathered(
        {name: _compared_size(value) for name, value in wanted.items()}
    ):
        sizes |= of_rank
    # Of each difference, whether ``partial`` allows it.
    differences: dict[str, bool] = {}
    grown: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in sizes_then:
            differences[f"{name} was not saved"] = _is_new(name, sizes_then)
            continue
        table = table_in_name(name)
        before = sizes_then[name]
        if table and len(size) < len(before):
            # Numbers per row, of which there is one for each split of the columns.
            if before[1] != len(_saved_widths(name, saved.index)):
                differences[f"{name} has one number a row, saved as {before}"] = False
                continue
            before = before[: len(size)]
        if size != before:
            has_grown = bool(table) and size[1:] == before[1:] and size > before
            differences[f"{name} is {size}, saved as {before}"] = has_grown
            if has_grown:
                grown[table] = before[0]
    for name in sizes_then.keys() - sizes.keys():
        table = table_in_name(name)
        # Else the table is there, but its optimizer keeps another state.
        if table or name.startswith("dense."):
            differences[f"{name} is not in this model"] = table not in state.tables
    said = _refuse(saved.path, differences, partial)
    tensors: State = {}
    for name, value in wanted.items():
        table = table_in_name(name)
        if isinstance(value, Parts) and table in grown:
            value = _clip_rows(value, grown[table])
        if name in sizes_then:
            tensors[name] = value
    return Match(tensors, grown, said)


def _compared_size(value: Any) -> Size:
    """Returns the size to compare; of a number per row the rows alone: its columns depend on the table's split."""
    size = tuple(value.size())
    if isinstance(value, Parts) and value.widths:
        size = size[:1]
    return size


def _is_new(name: str, saved: Mapping[str, Size]) -> bool:
    """Whether a name that was not saved is of a new table or layer; else it is the state of another optimizer."""
    table = table_in_name(name)
    weight = name.partition("@")[0]
    if table:
        weight = f"tables.{table}.weight"
    return weight not in saved


def _clip_rows(value: Any, rows: int) -> Parts:
    """Clips a table or its state to its first rows, which were saved."""
    shards = [
        LocalShard(shard.tensor[: max(rows - shard.offsets[0], 0)], shard.offsets)
        for shard in value.parts
    ]
    return Parts((rows, *value.size()[1:]), shards, value.widths)


def _refuse(path: str, differences: dict[str, bool], partial: bool) -> list[str]:
    """Refuses differences, alike on every rank, and returns a line for each that is allowed."""
    said = []
    refused = []
    for line, allowed in sorted(differences.items()):
        if allowed and partial:
            said.append(line)
        else:
            refused.append((allowed, line))
    if not refused:
        return said
    remedy = ""
    if all(allowed for allowed, _ in refused):
        remedy = "; if meant: --start.path RUN --start.partial true in a new --run_dir, or load(partial=True)"
    name = path.rstrip("/").rpartition("/")[2]
    header = f"checkpoint '{name}' is of another model, {len(refused)} difference(s): "
    # What nothing allows comes first.
    lines = "; ".join(line for _, line in sorted(refused))
    room = _MOST_CHARACTERS - len(header) - len(remedy)
    text = textwrap.shorten(lines, room, placeholder=" ...")
    raise CheckpointError(f"{header}{text}{remedy}")


def load_checkpoint(
    saved: Saved,
    state: ModelState,
    together: CheckpointRanks,
    *,
    partial: bool = False,
    cold: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], Match]:
    """Loads a checkpoint into ``state``, saved under any plan and number of ranks.

    Args:
        saved: checkpoint in which :func:`damage` found nothing.
        state: state of the model and its optimizers.
        together: the ranks that load; all call it.
        partial: whether the model may differ. New rows of a table begin as the saved row of ``cold``, without
            optimizer state. New tables and layers keep their values; those that the model lacks are not loaded.
        cold: row of each table for unseen ids; 0 by default.

    Returns:
        The content of the checkpoint with its tensors, and the match of the model and the checkpoint.

    Raises:
        CheckpointError: the checkpoint was saved from another model; the first differences are named.
    """
    step_counts = state.counted()
    wanted = {**state.tensors, **step_counts}
    matched = match(saved, state, wanted, partial, together)
    of_content: State = {}
    for name, metadata in saved.index.state_dict_metadata.items():
        if name.startswith(CONTENT):
            assert isinstance(metadata, TensorStorageMetadata), "there is no other"
            dtype = metadata.properties.dtype
            of_content[name] = torch.empty(metadata.size, dtype=dtype)
    to_load = matched.tensors | of_content
    other_splits: dict[str, Parts] = {}
    for name, value in matched.tensors.items():
        if isinstance(value, Parts) and value.widths not in (
            (),
            _saved_widths(name, saved.index),
        ):
            to_load[name] = other_splits[name] = _saved_columns(
                value, name, saved.index
            )
    cold_rows = _cold_rows(state, matched, cold or {})
    load_tensors(saved, to_load, together.group)
    if cold_rows:
        # A load of its own: a name has one shape in a load, and these are full rows
        # even if the table is split.
        load_tensors(saved, cold_rows, together.group)
    # Kernels have counters, not tensors: the load filled copies.
    state.count(step_counts)
    for name, columns in other_splits.items():
        _merge(matched.tensors[name], columns)
    _grow(state, matched, cold_rows)
    return content_of_json(saved.manifest["content"], of_content), matched


def load_tensors(
    saved: Saved, tensors: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Loads tensors of a checkpoint by name; all ranks of the group call it, or this process alone."""
    try:
        dcp.load(
            dict(tensors),
            storage_reader=Reader(saved.path, saved.index),
            planner=LoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise CheckpointError(
            f"checkpoint '{saved.path}' could not be read: {cause(error)}"
        ) from None


def _saved_widths(name: str, index: Metadata) -> tuple[int, ...]:
    """Returns how many columns each saved number per row stands for; empty for other tensors."""
    saved: Any = index.state_dict_metadata
    weight = saved[f"tables.{table_in_name(name)}.weight"]
    widths = column_widths((chunk.offsets, chunk.sizes) for chunk in weight.chunks)
    return tuple(widths.values())


def _saved_columns(value: Parts, name: str, index: Metadata) -> Parts:
    """Returns memory for the saved numbers of a value's rows, under the saved split of the columns."""
    widths = _saved_widths(name, index)
    buffers = {}
    for shard in value.parts:
        row = shard.offsets[0]
        # Parts of this rank with the same rows share a buffer.
        buffers[row] = LocalShard(torch.empty(len(shard.tensor), len(widths)), (row, 0))
    return Parts((value.size()[0], len(widths)), list(buffers.values()), widths)


def _merge(value: Any, saved: Parts) -> None:
    """Writes the mean of the numbers per row that the saved parts of a table's columns had.

    A table with split columns keeps one sum of squared gradients per part, their mean over its columns. The mean over
    the parts, weighted by their widths, is the sum of the unsplit table for the same gradients.
    """
    weights = torch.tensor(saved.widths, dtype=torch.float64) / sum(saved.widths)
    by_row = {shard.offsets[0]: shard.tensor for shard in saved.parts}
    for shard in value.parts:
        means = by_row[shard.offsets[0]].double() @ weights
        shard.tensor.copy_(means.unsqueeze(1))


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
    for name, value in state.tensors.items():
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
            rows = shard.tensor[saved_rows:]
            if row is None:
                rows.zero_()
            else:
                column = shard.offsets[1]
                rows.copy_(row[:, column : column + rows.shape[1]].expand_as(rows))
