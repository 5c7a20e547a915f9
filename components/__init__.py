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
    redis: Optional[str] = None,
    redis_password_file: Optional[str] = None,
    delete: Optional[str] = None,
    expire: Optional[float] = None,
    tower: Optional[str] = None,
    store: Optional[str] = None,
    keep: Optional[int] = None,
    procs: int = 1,
    name: str = "embed",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 0,
    memMB: int = 0,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Runs one tower of a bundle over a catalogue of parquet files, into a store of vectors by id, or into a Redis.

    On this machine::

        torchx run rec.embed --bundle runs/a/bundle \
            --catalogue items.parquet --id item_id --out vectors --procs 2
        torchx run rec.embed --bundle runs/a/bundle --catalogue changed.parquet --id item_id \
            --refresh vectors --delete 17,18
        torchx run rec.embed --bundle runs/a/bundle --tower query --redis redis://host:6379/0

    Args:
        args: further flags of torchx_apps.embed, after --
        bundle: a bundle's folder, or a run folder with one
        catalogue: a parquet file, a folder of such files, a pattern or an address, with the raw columns of the tower;
            where not given the users that the bundle knows, for tower query
        id: name of the column with the ids
        out: folder of the store, written whole; a store that exists gets a new version
        refresh: folder of an existing store, instead of out; the rows of catalogue are those that changed or are new
        redis: address of a Redis for the vectors of --tower query, instead of out (ex. redis://host:6379/0)
        redis_password_file: file with the Redis's password; where not given the variable REDIS_PASSWORD, if set
        delete: ids to delete, by commas, or X.parquet or FOLDER/ with them in the column id; for refresh and redis
        expire: seconds after which the Redis forgets a vector, a day where not given; 0 for never
        tower: a tower of the bundle, or query for all towers of the query; the candidate's where not given
        store: type of the stored vectors for out: fp32, fp16 or int8; fp32 where not given
        keep: number of the store's versions that stay; all of them where not given
        procs: number of processes that share the rows
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores; 0 for one per process, at least 2
        memMB: memory in MiB; 0 for 2048 per process, at least 4096
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    if procs < 1:
        raise ValueError(f"--procs {procs}: must be 1 or more")
    flags = [
        "-m",
        "torchx_apps.agent",
        "--standalone",
        f"--nproc_per_node={procs}",
        "-m",
        "torchx_apps.embed",
        bundle,
    ]
    if catalogue is not None:
        flags += ["--catalogue", catalogue]
    options = {
        "id": id,
        "out": out,
        "refresh": refresh,
        "redis": redis,
        "redis-password-file": redis_password_file,
        "delete": delete,
        "expire": expire,
        "tower": tower,
        "store": store,
        "keep": keep,
    }
    return _process(
        "embed",
        [*flags, *_as_flags(options), *args],
        name=name,
        image=image,
        h=h,
        cpu=cpu or max(2, procs),
        memMB=memMB or max(4096, 2048 * procs),
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
