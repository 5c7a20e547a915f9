"""Weights from a bundle's safetensors files, memory-mapped, into modules that were made on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchrec_ext.modules.shared_tables import values_by_table
from torchrec_ext.retrieval.errors import BundleError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped; the format holds no code, and its sizes are checked against the file's.

    Raises:
        BundleError: there is no such file, or it is none of this format.
    """
    try:
        with safe_open(path, framework="pt") as found:
            return {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118  it is no mapping
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise BundleError(f"{path}: cannot be read as safetensors ({error}); export the bundle again, or copy it anew") from None


def fill_dense(where: Path, module: nn.Module, tensors: Mapping[str, Tensor], tables: Sequence[str]) -> None:
    """Puts weights in the place of those on the meta device; what stands in ``tables`` is there already.

    Raises:
        BundleError: a weight is missing, too many, or of another shape.
    """
    wanted = {name: value for name, value in module.state_dict().items() if name not in tables}
    for name in sorted({*wanted, *tensors}):
        if name not in tensors or name not in wanted:
            which = "is missing" if name in wanted else "belongs to no module"
            raise BundleError(f"{where}: weight '{name}' {which}: these weights are of another model; export the bundle again")
        if wanted[name].shape != tensors[name].shape or wanted[name].dtype != tensors[name].dtype:
            raise BundleError(
                f"{where}: weight '{name}' is {tuple(tensors[name].shape)} {tensors[name].dtype}, the architecture needs "
                f"{tuple(wanted[name].shape)} {wanted[name].dtype}; export the bundle again"
            )
    module.load_state_dict(dict(tensors), strict=False, assign=True)


def fill_tables(folder: Path, model: nn.Module, files: Mapping[str, str]) -> None:
    """Puts the rows of every table of ``model`` in the place of those on the meta device, memory-mapped.

    Args:
        folder: of the bundle.
        model: on the meta device.
        files: by table its file.

    Raises:
        BundleError: a file is of another table.
    """
    for name, holder, weight in values_by_table(model):
        if name not in files:
            raise BundleError(f"{folder}: table '{name}' has no file; export the bundle again")
        path = folder / files[name]
        rows = read_tensors(path).get("weight")
        if rows is None or rows.shape != weight.shape or rows.dtype != weight.dtype:
            found = "no tensor 'weight'" if rows is None else f"{tuple(rows.shape)} {rows.dtype}"
            raise BundleError(
                f"{path}: {found}, table '{name}' is {tuple(weight.shape)} {weight.dtype}: it is of another model, or was cast; "
                "export the bundle again"
            )
        holder.weight = nn.Parameter(rows, requires_grad=False)


def table_paths(model: nn.Module) -> list[str]:
    """The names of the tables' weights in the state dict of ``model``."""
    holders = {id(holder) for _, holder, _ in values_by_table(model)}
    return [f"{path}.weight" for path, module in model.named_modules() if id(module) in holders]
