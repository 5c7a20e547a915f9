"""Preprocess data: fit on training rows, transform files, in one process.

TorchX executes this file on its own, so it imports nothing but torchx and typing and names its app by string.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs


def preprocess(
    *args: str,
    recipe: str = "ml_100k",
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    settings: Optional[str] = None,
    out: Optional[str] = None,
    name: str = "preprocess",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Fits a recipe's preprocessor on its training rows and transforms its files.

    Example::

        torchx run rec.data.preprocess --recipe ml_100k \
            --set config.folder=data/ml-100k --out data/ml-100k-ready

    Args:
        args: further flags of torchx_apps.preprocess, after -- (ex. -- --dry-run)
        recipe: a built-in recipe (ml_100k, clicks), my_recipe.py:job or my.module:job
        set: change one key of the recipe, such as config.min_count=5; give --set as often as you like
        settings: a TOML file of such changes, [loader] with batch_size = 4096; those of set come after it
        out: folder for the result; a new one in runs/ where not given
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores
        memMB: memory in MiB
        env: environment (ex. TMPDIR=/scratch)
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    flags = ["-m", "torchx_apps.preprocess", "--recipe", recipe]
    for flag, value in (
        ("--set", set),
        ("--settings", settings),
        ("--out", out),
    ):
        if value:
            flags.append(f"{flag}={value}")
    role = specs.Role(
        name="preprocess",
        image=image,
        entrypoint="python3",
        args=[*flags, *args],
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        resource=specs.resource(cpu=cpu, memMB=memMB, gpu=0, h=h),
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
