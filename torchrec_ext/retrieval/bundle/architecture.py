"""Modules as JSON and back: a class by its name in a fixed list, with its constructor's arguments.

Every description is checked against that list and against limits before anything is constructed. Modules are
constructed on the meta device, so a file can import nothing, run no code and take no memory. Their weights are then
memory-mapped from the bundle's safetensors files.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

from torchrec_ext.models.ncf import NCFHead, NCFTower
from torchrec_ext.models.session import NextItemTower
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import INTERACTIONS as RECIPE_INTERACTIONS
from torchrec_ext.modules.interaction import MultiTaskTop, Reordered
from torchrec_ext.modules.layers import Made, Recorded, how_made
from torchrec_ext.modules.session_encoder import SessionEncoder
from torchrec_ext.modules.session_tower import SessionSteps, SessionTop, SessionTower
from torchrec_ext.modules.shared_tables import values_by_table
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.program import ProgramTop, ProgramTower
from torchrec_ext.schema.validation import listed

TOWERS: tuple[type[nn.Module], ...] = (
    Tower,
    NCFTower,
    SessionTower,
    SessionSteps,
    NextItemTower,
    ProgramTower,
)
INTERACTION_CLASSES: tuple[type[nn.Module], ...] = (
    *RECIPE_INTERACTIONS.values(),
    MultiTaskTop,
    NCFHead,
    ProgramTop,
    Reordered,
    SessionTop,
)
_MODULES = {
    kind.__name__: kind for kind in (*TOWERS, *INTERACTION_CLASSES, SessionEncoder)
}
_TABLES = {kind.__name__: kind for kind in (EmbeddingBagConfig, EmbeddingConfig)}
_ARGUMENTS: dict[str, Any] = {**_TABLES, "Compression": Compression}
_TABLE_FIELDS = (
    "name",
    "feature_names",
    "num_embeddings",
    "embedding_dim",
    "data_type",
    "pooling",
)
# About a table's initial values, which its weights replace.
_INITIAL = ("init_fn", "weight_init_max", "weight_init_min")
_REPEATED = ("layers", "tasks", "heads")  # arguments that set a number of submodules
_MOST_REPEATED = 256
_WIDEST = 2**24
_LONGEST = 4096
_DEEPEST = 16
_MOST_ROWS = 2**48


def describe_module(
    module: nn.Module | Made, *, also: Sequence[type[nn.Module]] = ()
) -> dict[str, Any]:
    """Describes a module as JSON values: its class by name, and its constructor's arguments.

    Args:
        module: one of this package's towers and interactions, or the record of its construction.
        also: further allowed classes, each ``Recorded``; pass them to :func:`rebuild` too.

    Raises:
        BundleError: another class, or an argument without a JSON form; the message names it and the remedy.
    """
    record = module if isinstance(module, Made) else how_made(module)
    name = record.kind.__name__
    if _allowed_classes(also).get(name) is not record.kind:
        raise BundleError(
            f"module {record.kind.__module__}.{record.kind.__qualname__}: not one of the classes that "
            f"a bundle can name ({listed(sorted(_MODULES))}); put Recorded before nn.Module among its "
            f"bases, and give also=[{name}]"
        )
    if record.arguments is None:
        raise BundleError(
            f"module {name}: does not remember its arguments; put torchrec_ext.modules.layers.Recorded before "
            "nn.Module among its bases"
        )
    arguments = {}
    for key, value in record.arguments.items():
        if key != "device":  # that of the training
            arguments[key] = _describe_value(f"{name}({key}=", value, also)
    return {"class": name, "arguments": arguments}


def rebuild(description: Any, *, also: Sequence[type[nn.Module]] = ()) -> nn.Module:
    """Constructs a module from its description on the meta device, without weights or memory.

    Args:
        description: result of :func:`describe_module`; it may come from an untrusted file.
        also: further classes allowed in the description.

    Raises:
        BundleError: the description names another class, an unknown argument, or a value beyond a limit.
    """
    module = _build_value("architecture", description, also, 0)
    if not isinstance(module, nn.Module):
        raise BundleError(
            f"architecture: {_shorten(description)} describes no module; export the bundle again"
        )
    return module


def _allowed_classes(also: Sequence[type[nn.Module]]) -> dict[str, type[nn.Module]]:
    classes = dict(_MODULES)
    for kind in also:
        # A file names classes by one word, so no class of a caller may have a name of
        # ours.
        if kind.__name__ in _MODULES or not issubclass(kind, Recorded):
            raise BundleError(
                f"also: {kind.__name__} must be Recorded, and have a name of its own (not {listed(sorted(_MODULES))})"
            )
        classes[kind.__name__] = kind
    return classes


def _describe_value(where: str, value: Any, also: Sequence[type[nn.Module]]) -> Any:
    # JSON has no NaN and no infinity.
    if (
        value is None
        or isinstance(value, bool | int | str)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    if isinstance(value, nn.Module):
        return describe_module(value, also=also)
    if isinstance(value, EmbeddingBagConfig | EmbeddingConfig):
        # Fields that a bundle does not have must be as in a new table, or the bundle
        # would compute otherwise.
        plain = type(value)(num_embeddings=1, embedding_dim=1, feature_names=[])
        for field in dataclasses.fields(value):
            differs = getattr(value, field.name) != getattr(plain, field.name)
            if differs and field.name not in (*_TABLE_FIELDS, *_INITIAL):
                raise BundleError(
                    f"{where} table '{value.name}' has {field.name}={getattr(value, field.name)!r}, which a bundle "
                    "cannot hold; serve it from a copy of the table without"
                )
        fields = {
            name: getattr(value, name) for name in _TABLE_FIELDS if hasattr(value, name)
        }
        fields["data_type"] = value.data_type.value
        if isinstance(value, EmbeddingBagConfig):
            fields["pooling"] = value.pooling.value
        return {"class": type(value).__name__, "arguments": fields}
    if isinstance(value, Compression):
        return {"class": "Compression", "arguments": dataclasses.asdict(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            "mapping": {
                key: _describe_value(where, each, also) for key, each in value.items()
            }
        }
    if isinstance(value, list | tuple):
        return [_describe_value(where, each, also) for each in value]
    raise BundleError(
        f"{where}{_shorten(value)}): a {type(value).__name__} cannot be written down; use numbers, names and lists"
    )


def _build_value(
    where: str, value: Any, also: Sequence[type[nn.Module]], depth: int
) -> Any:
    if depth > _DEEPEST:
        raise BundleError(
            f"{where}: nested deeper than {_DEEPEST}; export the bundle again"
        )
    if isinstance(value, list):
        if len(value) > _LONGEST:
            raise BundleError(
                f"{where}: a list of {len(value):,} entries, at most {_LONGEST:,} are read; export the bundle again"
            )
        return [_build_value(where, each, also, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"mapping"} and isinstance(value["mapping"], dict):
        mapping = {}
        for key, each in value["mapping"].items():
            mapping[key] = _build_value(f"{where}.{key}", each, also, depth + 1)
        return mapping
    if (
        set(value) != {"class", "arguments"}
        or not isinstance(value["class"], str)
        or not isinstance(value["arguments"], dict)
    ):
        raise BundleError(
            f"{where}: {_shorten(value)} is neither a class with arguments nor a mapping; export the bundle again"
        )
    name = value["class"]
    arguments = {}
    for key, each in value["arguments"].items():
        arguments[key] = _build_value(f"{where}.{name}.{key}", each, also, depth + 1)
    classes: dict[str, Any] = {**_ARGUMENTS, **_allowed_classes(also)}
    if name not in classes:
        raise BundleError(
            f"{where}: class {name!r} is not one that a bundle may name ({listed(sorted(classes))}); if it is your "
            "own, give it to Bundle.load as also=[...]"
        )
    # Before construction: a huge number of layers takes time and memory on the meta
    # device too.
    _check_sizes(f"{where}.{name}", arguments, table=name in _TABLES)
    try:
        if name in _TABLES:
            arguments["data_type"] = DataType(arguments["data_type"])
            if "pooling" in arguments:
                arguments["pooling"] = PoolingType(arguments["pooling"])
        elif "device" in inspect.signature(classes[name]).parameters:
            arguments["device"] = torch.device("meta")
        with torch.device("meta"):
            return classes[name](**arguments)
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        RuntimeError,
        IndexError,
        ZeroDivisionError,
    ) as error:
        raise BundleError(
            f"{where}: {name} cannot be made of {_shorten(arguments)}: {error}; export the bundle again"
        ) from None


def _check_sizes(where: str, arguments: Mapping[str, Any], *, table: bool) -> None:
    for key, value in arguments.items():
        numbers = value if isinstance(value, list) else [value]
        most = _WIDEST
        if table and key == "num_embeddings":
            most = _MOST_ROWS
        elif key in _REPEATED:
            most = _MOST_REPEATED
        for number in numbers:
            if isinstance(number, int) and abs(number) > most:
                raise BundleError(
                    f"{where}: {key}={number:,} is beyond the {most:,} that are read; export the bundle again"
                )


def _shorten(value: Any) -> str:
    text = repr(value)
    if len(text) > 120:
        text = f"{text[:117]}..."
    return text


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file, memory-mapped. The format holds no code, and sizes are checked.

    Raises:
        BundleError: the file is missing, or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is not a mapping
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise BundleError(
            f"{path}: cannot be read as safetensors ({error}); export the bundle again, or copy it anew"
        ) from None


def fill_dense(
    where: Path, module: nn.Module, tensors: Mapping[str, Tensor], tables: Sequence[str]
) -> None:
    """Replaces meta weights by real ones, except the tables' (see :func:`map_tables`).

    Args:
        where: path of the weights, for messages.
        module: module on the meta device.
        tensors: weights by name.
        tables: names of the tables' weights.

    Raises:
        BundleError: a weight is missing, unexpected, or of another shape.
    """
    expected = {
        name: value for name, value in module.state_dict().items() if name not in tables
    }
    for name in sorted({*expected, *tensors}):
        if name not in tensors or name not in expected:
            problem = "is missing"
            if name not in expected:
                problem = "belongs to no module"
            raise BundleError(
                f"{where}: weight '{name}' {problem}: these weights are of another model; export the bundle again"
            )
        tensor = tensors[name]
        weight = expected[name]
        if tensor.shape != weight.shape or tensor.dtype != weight.dtype:
            raise BundleError(
                f"{where}: weight '{name}' is {tuple(tensor.shape)} {tensor.dtype}, the architecture needs "
                f"{tuple(weight.shape)} {weight.dtype}; export the bundle again"
            )
    # Assigned, because meta tensors have no memory to copy into; not strict, because
    # the tables are none of these.
    module.load_state_dict(dict(tensors), strict=False, assign=True)


class Int8Table(nn.Module):
    """An int8 table with a scale per row; replaces an EmbeddingBag or an Embedding.

    Only the rows of a look-up are converted to float32.

    Args:
        holder: replaced module, for its pooling.
        rows: (N, D) int8.
        scales: (N,) float32.
    """

    def __init__(self, holder: nn.Module, rows: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows, requires_grad=False)
        # A plain attribute: a buffer would be one of the weights that fill_dense()
        # expects.
        self.scales = scales
        self._mode: str | None = None
        if isinstance(holder, nn.EmbeddingBag):
            self._mode = holder.mode

    def rows(self, ids: Tensor) -> Tensor:
        """Returns (len(ids), D) float32 rows."""
        return self.weight[ids].float().mul_(self.scales[ids, None])

    def forward(
        self,
        input: Tensor,  # noqa: A002  (torch's name)
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks up rows by id, or (B, D) pooled bags, like the replaced module."""
        rows = self.rows(input)
        if self._mode is None:
            return rows
        return embedding_bag(
            # The rows are in the order of the ids already.
            torch.arange(len(input)),
            rows,
            offsets,
            mode=self._mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=True,
        )


def map_tables(folder: Path, model: nn.Module, files: Mapping[str, str]) -> None:
    """Replaces the meta weights of every table by memory-mapped rows.

    Args:
        folder: folder of the bundle.
        model: model on the meta device.
        files: file of each table by the table's name.

    Raises:
        BundleError: a file is of another table.
    """
    # A list, because replacing a table changes the modules that values_by_table() walks
    # through.
    for name, holder, weight in list(values_by_table(model)):
        if name not in files:
            raise BundleError(
                f"{folder}: table '{name}' has no file; export the bundle again"
            )
        file = folder / files[name]
        tensors = read_tensors(file)
        rows = tensors.get("weight")
        scales = tensors.get("scale")
        if rows is not None and scales is not None and _is_int8(rows, scales, weight):
            table = Int8Table(holder, rows, scales)
            for path, module in list(model.named_modules(remove_duplicate=False)):
                if module is holder:
                    model.set_submodule(path, table)
            continue
        if rows is None or rows.shape != weight.shape or rows.dtype != weight.dtype:
            content = "no tensor 'weight'"
            if rows is not None:
                content = f"{tuple(rows.shape)} {rows.dtype}"
            raise BundleError(
                f"{file}: {content}, table '{name}' is {tuple(weight.shape)} {weight.dtype}: it is of another model, "
                "or was cast; export the bundle again"
            )
        # The mapped rows themselves: nothing is read before a look-up, and all
        # processes share the pages.
        holder.weight = nn.Parameter(rows, requires_grad=False)


def _is_int8(rows: Tensor, scales: Tensor, weight: Tensor) -> bool:
    if rows.shape != weight.shape or scales.shape != weight.shape[:1]:
        return False
    return rows.dtype == torch.int8 and scales.dtype == torch.float32


def table_paths(model: nn.Module) -> list[str]:
    """Returns the names of the tables' weights in the state dict of ``model``."""
    holders = {id(holder) for _, holder, _ in values_by_table(model)}
    return [
        f"{path}.weight"
        for path, module in model.named_modules()
        if id(module) in holders
    ]
