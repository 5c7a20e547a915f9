"""What a checkpoint has for a model, name by name: what fits, what grew, and what must be allowed or is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.train.checkpoint.parts import Part, Parts, State
from torchrec_ext.train.checkpoint.state import ModelState
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchrec_ext.train.checkpoint.together import Together

Change = Literal["more_rows", "new_tables", "fewer_tables", "new_layers", "fewer_layers"]


@dataclass
class Match:
    """What of a model a checkpoint fills.

    Args:
        tensors: to be loaded; of a table with more rows than were saved, those that were.
        row_states: names of these, likewise.
        grown: tables with more rows, and how many were saved.
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
    together: Together,
) -> Match:
    """Compares a model with what was saved.

    Args:
        path: for messages.
        state: the model.
        wanted: its tensors without row states.
        index: of the checkpoint.
        saved: its manifest.
        allow: the kinds of differences that are wanted.
        together: all ranks call it.

    Raises:
        CheckpointError: there is a difference of another kind; every one is named, on every rank alike.
    """
    there = {name: tuple(getattr(held, "size", ())) for name, held in index.state_dict_metadata.items()}
    mine = {name: tuple(held.size()) for name, held in wanted.items()} | {
        name: (own.rows,) for name, own in state.row_states.items()
    }
    sizes = {name: (size[:1] if name in state.row_states else size) for name, size in there.items()}
    differences: dict[str, Change | None] = {}
    found = Match({}, [])
    for name, size in mine.items():
        kind = _kind(name, size, sizes.get(name), saved)
        if kind == "more_rows":
            found.grown[name.split(".")[1]] = sizes[name][0]
        if kind != "fits":
            differences[_line(name, size, sizes.get(name))] = kind  # type: ignore[assignment]
        if kind in ("fits", "more_rows"):
            if name in state.row_states:
                found.row_states.append(name)
            else:
                found.tensors[name] = _clipped(wanted[name], sizes[name])
    known = {*mine, *(f"tables.{name}.{slot}" for name in state.tables for slot in _slots(state))}
    for name in there:
        if name.startswith(("tables.", "dense.")) and name not in known:
            gone = "fewer_tables" if name.startswith("tables.") and name.split(".")[1] not in state.tables else None
            differences[f"{name} is not in this model"] = "fewer_layers" if name.startswith("dense.") else gone  # type: ignore[assignment]
    _refuse(path, differences, allow, together, found)
    return found


def _kind(name: str, size: tuple[int, ...], before: tuple[int, ...] | None, saved: Mapping[str, Any]) -> str | None:
    """``fits``, the change that it would be, or None for one that nothing allows."""
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
    parts = [Part(part.tensor[: max(size[0] - part.offsets[0], 0)], part.offsets) for part in held.parts]
    return Parts(size, parts)


def _refuse(path: str, differences: dict[str, Change | None], allow: Sequence[Change], together: Together, found: Match) -> None:
    said = together.gathered(differences)
    everything = {line: kind for own in said for line, kind in own.items() if _agreed(line, said)}
    refused = [line for line, kind in everything.items() if kind not in allow]
    found.said = [line for line in everything if line not in refused]
    if refused:
        more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
        kinds = sorted({kind for line, kind in everything.items() if line in refused and kind} & set(get_args(Change)))
        remedy = f"; if that is meant, allow it: start.allow={','.join([*allow, *kinds])}" if kinds else ""
        raise CheckpointError(f"checkpoint '{path}' is of another model or optimizer: {'; '.join(refused[:8])}{more}{remedy}")


def _agreed(line: str, said: Sequence[Mapping[str, Any]]) -> bool:
    """A rank that holds no part of a table does not know its names; another one does."""
    return not line.endswith("is not in this model") or all(line in own for own in said)


def _slots(state: ModelState) -> set[str]:
    return {name.rpartition(".")[2] for name in [*state.tensors, *state.row_states] if name.startswith("tables.")} | {"weight"}
