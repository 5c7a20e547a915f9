"""TorchX components, such as `rec.train.hybrid`; here is the short name `rec.embed`.

TorchX executes this file on its own, so it imports nothing but torchx and typing and names its app by string.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs


def embed(
    *args: str,
    bundle: str,
    catalogue: Optional[str] = None,
    id: Optional[str] = None,  # noqa: A002  (the flag is --id)
    out: Optional[str] = None,
    refresh: Optional[str] = None,
    delete: Optional[str] = None,
    tower: Optional[str] = None,
    store: Optional[str] = None,
    name: str = "embed",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 2048,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Runs one side of a bundle over a catalogue of parquet files, into a store of vectors by id.

    On this machine::

        torchx run rec.embed --bundle runs/a/bundle \
            --catalogue items.parquet --id item_id --out vectors
        torchx run rec.embed --bundle runs/a/bundle --catalogue changed.parquet --id item_id \
            --refresh vectors --delete 17,18
        torchx run rec.embed --bundle runs/a/bundle --tower query --out users

    Args:
        args: further flags of torchx_apps.embed, after --
        bundle: a bundle's folder, or a run folder with one
        catalogue: a parquet file, a folder of such files, a pattern or an address, with the raw columns of the side;
            where not given the users that the bundle knows, for tower query
        id: name of the column with the ids
        out: folder of the store, written whole; one that is there is replaced
        refresh: folder of an existing store, instead of out; the rows of catalogue are those that changed or are new
        delete: ids to delete, by commas, or X.parquet or FOLDER/ with them in the column id; for refresh
        tower: the side that embeds the rows, query or candidate; candidate where not given
        store: type of the stored vectors for out: fp32 or fp16; fp32 where not given
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores
        memMB: memory in MiB
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    flags = ["-m", "torchx_apps.embed", bundle]
    if catalogue is not None:
        flags += ["--catalogue", catalogue]
    options = {
        "id": id,
        "out": out,
        "refresh": refresh,
        "delete": delete,
        "tower": tower,
        "store": store,
    }
    return _process(
        "embed",
        [*flags, *_as_flags(options), *args],
        name=name,
        image=image,
        h=h,
        cpu=cpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        variables={"OMP_NUM_THREADS": "1"},
    )


def _as_flags(options: Dict[str, object]) -> List[str]:
    return [f"--{flag}={value}" for flag, value in options.items() if value is not None]


# The quotes keep it from TorchX's list of components, which are all functions annotated
# with AppDef itself.
def _process(
    role: str,
    words: List[str],
    name: str,
    image: str,
    h: Optional[str],
    cpu: int,
    memMB: int,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]],
    mounts: Optional[List[str]],
    variables: Optional[Dict[str, str]] = None,
) -> "specs.AppDef":
    process = specs.Role(
        name=role,
        image=image,
        entrypoint="python3",
        args=words,
        # Unbuffered, or a pod's log stays empty for minutes.
        env={**(variables or {}), "PYTHONUNBUFFERED": "1", **(env or {})},
        resource=specs.resource(cpu=cpu, memMB=memMB, gpu=0, h=h),
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[process])
