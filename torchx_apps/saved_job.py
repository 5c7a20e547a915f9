"""saved_job(): the Job of a run folder, from its recipe and its ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from torchx_apps.cli import built_in_recipes, load_recipe
from torchx_apps.job import Job
from torchx_apps.overrides import field_hint, is_group

CONFIG = "config.json"


def saved_job(run: Path, recipe: str | None = None) -> Job:
    """The job that wrote a run folder.

    Args:
        run: the folder.
        recipe: that made it; by the name in ``config.json`` where not given, which must be a built-in one.

    Raises:
        ValueError: there is no such folder, its recipe is not built in, or its configuration is of another one.
    """
    path = run / CONFIG
    try:
        saved = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a run folder, such as runs/two_tower-DATE") from None
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); name another run folder") from None
    name = saved.get("name")
    if recipe is None and name not in built_in_recipes():
        raise ValueError(f"{path}: recipe {name!r} is not built in; say where it is: --recipe my_recipe.py:job")
    job = load_recipe(recipe or name)
    if job.name != name:
        raise ValueError(f"--recipe {recipe}: its jobs are named {job.name!r}, {path} is of {name!r}; give the recipe of that run")
    try:
        restored: Job = _restored(job, saved)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: does not fit the recipe as it is now ({error}); give what differs by --set") from None
    return restored


def _restored(config: Any, saved: Mapping[str, Any]) -> Any:
    """``config`` with the values of a JSON object."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not field.init or field.name not in saved or callable(value):
            continue
        told = saved[field.name]
        if is_group(value) and isinstance(told, dict):
            changes[field.name] = _restored(value, told)
        else:
            changes[field.name] = _value(field_hint(config, field.name), told)
    return dataclasses.replace(config, **changes)


def _value(hint: Any, told: Any) -> Any:
    """JSON to what a field of type ``hint`` holds."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(told, dict):
        group = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if group is not None:
            made: Any = group
            hints = typing.get_type_hints(made)
            return made(**{name: _value(hints[name], value) for name, value in told.items()})
    if isinstance(told, list):
        inner = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple), Any)
        return tuple(_value(inner, value) for value in told)
    if isinstance(told, str) and Path in kinds:
        return Path(told)
    return told
