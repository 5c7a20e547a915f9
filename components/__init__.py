"""TorchX components, such as `rec.train.hybrid`; here are the short names `rec.plan`, `rec.embed` and `rec.evaluate`.

TorchX executes this file on its own, so it imports nothing but torchx and typing and names its app by string.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs


def plan(
    *args: str,
    tables: Optional[str] = None,
    recipe: Optional[str] = None,
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    settings: Optional[str] = None,
    world_size: int = 8,
    local_world_size: Optional[int] = None,
    device: str = "cuda",
    hbm: float = 80.0,
    ddr: float = 1024.0,
    intra: float = 600.0,
    inter: float = 12.5,
    batch_size: Optional[int] = None,
    sharding: Optional[str] = None,
    kernel: Optional[str] = None,
    cache_load_factor: Optional[float] = None,
    ssd: Optional[float] = None,
    optimizer: Optional[str] = None,
    out: Optional[str] = None,
    name: str = "plan",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 1,
    memMB: int = 2048,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Plans tables for devices that need not exist: memory and time of each rank, or what would make a plan fit.

    On this machine, without a GPU::

        torchx run rec.plan --tables ad=300Mx64,item=12Mx64 --world_size 64
        torchx run rec.plan --recipe two_tower --world_size 2 --device cpu --ddr 8

    Args:
        args: further flags of torchx_apps.plan, after -- (ex. -- --json --reserve 0.2)
        tables: NAME=ROWSxDIM or NAME=ROWSxDIMxIDS with the mean ids of a row, by commas (ex.
            ad=300Mx64,history=12Mx64x20)
        recipe: a built-in recipe, my_recipe.py:job or my.module:job, whose tables are planned instead of tables
        set: change one key of the recipe, such as model.embedding_dim=64; give --set as often as you like
        settings: a TOML file of such changes, [loader] with batch_size = 4096; those of set come after it
        world_size: number of devices, a process each
        local_world_size: number of devices of a host; 8, or all where there are fewer
        device: cuda or cpu
        hbm: GiB of memory of a GPU
        ddr: GiB of memory of a host; 0 beside GPUs keeps every table on them
        intra: GiB/s that a device sends to those of its host
        inter: GiB/s that a device sends to those of other hosts
        batch_size: rows of a device and step; the recipe's, or 1024
        sharding: auto, or one sharding type for every table; the recipe's, or auto
        kernel: auto, or one compute kernel for every table: fused, fused_uvm, fused_uvm_caching, key_value
        cache_load_factor: share of a table's rows that the cache on a GPU holds; the recipe's, or TorchRec's .2
        ssd: GiB of SSD of a host, for kernel key_value
        optimizer: optimizer of the tables; the recipe's, or row_wise_adagrad
        out: folder for plan.txt, plan.json and a picture of memory by rank
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores
        memMB: memory in MiB
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    flags = [
        "-m",
        "torchx_apps.plan",
        f"--world-size={world_size}",
        f"--device={device}",
    ]
    flags += [f"--hbm={hbm}", f"--ddr={ddr}", f"--intra={intra}", f"--inter={inter}"]
    options = {
        "tables": tables,
        "recipe": recipe,
        "set": set,
        "settings": settings,
        "local-world-size": local_world_size,
        "batch-size": batch_size,
        "sharding": sharding,
        "kernel": kernel,
        "cache-load-factor": cache_load_factor,
        "ssd": ssd,
        "optimizer": optimizer,
        "out": out,
    }
    words = [*flags, *_as_flags(options), *args]
    return _process(
        "plan",
        words,
        name=name,
        image=image,
        h=h,
        cpu=cpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
    )


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


def evaluate(
    *args: str,
    users: str,
    items: str,
    truth: str,
    seen: Optional[str] = None,
    metrics: Optional[str] = None,
    similarity: str = "dot",
    out: Optional[str] = None,
    name: str = "evaluate",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Evaluates vectors of users and items, whoever made them: exact figures over the whole catalogue.

    On this machine::

        torchx run rec.evaluate --users users.parquet --items items.parquet \
            --truth test.parquet --seen train.parquet --metrics recall@20,ndcg@20

    Args:
        args: further flags of torchx_apps.evaluate, after -- (ex. -- --json)
        users: file of the users' vectors: .npy, .npz, .safetensors, or .parquet with the columns id and vector
        items: file of the vectors of all items, in the same forms
        truth: parquet file of the pairs to find, with the columns user and item
        seen: parquet file of the pairs to leave out of a user's ranking
        metrics: recall, ndcg, hr, mrr, map or precision, each with its number of items shown, by commas (ex.
            recall@20,ndcg@20); these at 10 where not given
        similarity: dot or cosine
        out: folder for evaluation.json and evaluation.png
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores
        memMB: memory in MiB
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    flags = [
        "-m",
        "torchx_apps.evaluate",
        f"--users={users}",
        f"--items={items}",
        f"--truth={truth}",
    ]
    options = {"seen": seen, "metrics": metrics, "similarity": similarity, "out": out}
    words = [*flags, *_as_flags(options), *args]
    return _process(
        "evaluate",
        words,
        name=name,
        image=image,
        h=h,
        cpu=cpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
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
