"""Preprocess data: fit on training rows, transform files, in one process.

TorchX executes this file on its own, so it imports torchx and typing, and an app only inside of a function.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs


def preprocess(
    *args: str,
    recipe: str = "ml_100k",
    name: str = "preprocess",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Fits a recipe's preprocessor on its training rows and transforms its files.

    Example::

        torchx run -s local_cwd rec.data.preprocess --recipe ml_100k -- --config.folder data/ml-100k --out data/ready

    Args:
        args: flags of torchx_apps.preprocess, behind --, such as -- --out data/ready --config.min_count 5
        recipe: a built-in recipe (ml_100k, taobao), my_recipe.py:job or my.module:job
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores
        gpu: GPUs
        memMB: memory in MiB
        env: environment (ex. TMPDIR=/scratch)
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    words = ["--recipe", recipe, *args]
    # Imported here, because TorchX executes this file on its own.
    from torchx_apps.config import refuse_mistakes

    refuse_mistakes("torchx_apps.preprocess", words)
    role = specs.Role(
        name=name,
        image=image,
        entrypoint="python3",
        args=["-m", "torchx_apps.preprocess", *words],
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
