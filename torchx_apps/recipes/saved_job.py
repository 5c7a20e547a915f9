"""The job of a run folder, made again from its recipe and its ``config.json``; the run's records and summary."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from torchrec_ext.train.config import Record
from torchx_apps.config import is_group
from torchx_apps.recipes import RECIPES
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.tasks.job import Job

CONFIG = "config.json"
RECORDS = "metrics.jsonl"


def summary_of(run: Path) -> dict[str, Any]:
    """Returns the summary of a run folder; empty if there is none, as of a run that diverged or goes on."""
    summary: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        summary = json.loads((run / "summary.json").read_text())
    return summary


def records_in(run: Path) -> list[Record]:
    """Returns the records of a run folder so far; none of a line that is, or was at a kill, being written."""
    records: list[Record] = []
    with suppress(OSError):
        # Bytes: what a crash leaves in a line need be no text.
        for line in (run / RECORDS).read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


def saved_job(run: Path, recipe: str | None = None) -> Job:
    """Restores the job of a run folder.

    Args:
        run: path of the run folder.
        recipe: recipe of the run; by default the built-in one that is named in ``config.json``.

    Raises:
        ValueError: there is no such folder, its recipe is not built in, or its configuration belongs to another recipe.
    """
    path = run / CONFIG
    try:
        saved = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name a run folder of a recipe; without one call export()"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path}: is not a JSON file ({error}); name another run folder"
        ) from None
    name = saved.get("name")
    if recipe is None and name not in RECIPES:
        raise ValueError(
            f"{path}: recipe {name!r} is not built in; say where it is: --recipe my_recipe.py:job"
        )
    job = load_recipe(recipe or name)
    if job.name != name:
        raise ValueError(
            f"--recipe {recipe}: its jobs are named {job.name!r}, {path} is of {name!r}; give the recipe of that run"
        )
    try:
        return _restored(job, saved)  # type: ignore[no-any-return]
    except (NameError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(
            f"{path}: does not fit the recipe as it is now ({error}); give what differs, as in --model.loss bce"
        ) from None


def _restored(config: Any, saved: Mapping[str, Any]) -> Any:
    """Returns ``config`` with the values of a JSON object."""
    changes = {}
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A setting newer than the run keeps the recipe's value. Functions do too: the
        # file has their names alone.
        if not field.init or field.name not in saved or callable(value):
            continue
        json_value = saved[field.name]
        if is_group(value) and isinstance(json_value, dict):
            changes[field.name] = _restored(value, json_value)
        else:
            changes[field.name] = msgspec.convert(
                json_value,
                hints[field.name],
                dec_hook=lambda kind, text: kind(text),
            )
    return dataclasses.replace(config, **changes)
