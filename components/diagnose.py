"""Say why a training is slow: experiments on a recipe's own step, what will help and what will not.

TorchX executes this file on its own, so it imports nothing but torchx, typing and the component that trains.
"""

from typing import Dict, List, Optional

import torchx
from torchrec_ext.components.train import _app, _environment
from torchx import specs


def why_slow(
    *args: str,
    recipe: str = "two_tower",
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    settings: Optional[str] = None,
    budget: float = 25.0,
    out: Optional[str] = None,
    html: Optional[str] = None,
    trace: Optional[str] = None,
    apply: bool = False,
    j: str = "1x1",
    threads: int = 1,
    name: str = "why_slow",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Says why a recipe's training is slow: causes, what will help, by how much, and what will not.

    On this machine, on one rank and on two::

        torchx run rec.diagnose.why_slow --recipe ncf --set data.name=planted
        torchx run rec.diagnose.why_slow -j 1x2 --recipe two_tower

    Args:
        args: further flags of torchx_apps.diagnose, after -- (ex. -- --json)
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        set: change one key of the recipe, such as loader.batch_size=4096; give --set as often as you like
        settings: a TOML file of such changes, [loader] with batch_size = 4096; those of set come after it
        budget: seconds for the rounds of experiments; the first four may take three times as long
        out: folder for diagnosis.txt, diagnosis.json and diagnosis.html
        html: file for the page with pictures
        trace: file for a Chrome trace of the measured steps
        apply: whether to apply the remedies that keep the mathematics, and to measure what each gains
        j: NODESxPROCS; several ranks are diagnosed together, and rank 0 prints the page
        threads: OpenMP threads per rank; one is fastest on small models
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores; where not given, threads for every rank, and two at least
        gpu: GPUs
        memMB: memory in MiB; where not given, 2048 for every rank, and 4096 at least
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    flags = ["-m", "torchx_apps.diagnose", "--recipe", recipe, f"--budget={budget}"]
    options = [
        ("--set", set),
        ("--settings", settings),
        ("--out", out),
        ("--html", html),
        ("--trace", trace),
    ]
    for flag, value in options:
        if value:
            flags.append(f"{flag}={value}")
    if apply:
        flags.append("--apply")
    nodes, x, procs = j.partition("x")
    if not x or not all(
        count.isdecimal() and int(count) > 0 for count in (nodes, procs)
    ):
        raise ValueError(
            f"-j {j}: write NODESxPROCS in whole numbers from 1, such as -j 1x2"
        )
    # Several ranks run under the agent of a training, one is a process of its own.
    if j != "1x1":
        return _app(
            "torchx_apps.diagnose",
            [*flags[2:], *args],
            j=j,
            threads=threads,
            max_retries=0,
            name=name,
            image=image,
            h=h,
            cpu=cpu,
            gpu=gpu,
            memMB=memMB,
            env=env,
            mounts=mounts,
            rdzv_port=0,
            debug=False,
        )
    role = specs.Role(
        name="diagnose",
        image=image,
        entrypoint="python3",
        args=[*flags, *args],
        env=_environment(env, threads, max_retries=0, elastic=""),
        resource=specs.resource(
            cpu=cpu or max(2, threads), memMB=memMB or 4096, gpu=gpu, h=h
        ),
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
