"""Train a recipe hybrid-parallel: sharded tables, replicated or tower-parallel dense layers.

TorchX executes this file on its own, so it imports nothing but torchx and typing and names its app by string.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs
from torchx.components import dist


def hybrid(
    *args: str,
    recipe: str = "two_tower",
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    run_dir: Optional[str] = None,
    j: str = "1x2",
    threads: int = 1,
    max_retries: int = 0,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    rdzv_port: int = 29500,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains a recipe, hybrid-parallel, on NODESxPROCS ranks.

    On this machine::

        torchx run rec.train.hybrid --recipe two_tower -j 1x2 --set loader.batch_size=4096 --set data.name=planted

    On Slurm, inside the environment that is active when you submit::

        torchx run -s slurm -cfg partition=gpu,time=02:00:00 rec.train.hybrid -j 2x8 --gpu 8 --cpu 64 --memMB 400000

    On Kubernetes with Volcano, in an image that has this package::

        torchx run -s kubernetes -cfg queue=default rec.train.hybrid --image my_image:1 -j 2x4 --gpu 4 \
            --mounts type=volume,src=runs,dst=/runs --run_dir /runs/two_tower --max_retries 3

    Args:
        args: further flags of torchx_apps.train, after -- (ex. -- --dry-run)
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        set: change one key of the recipe, such as loader.batch_size=4096; give --set as often as you like
        run_dir: folder for checkpoints, metrics and plan; on several nodes one that all of them see
        j: NODESxPROCS, or MIN:MAXxPROCS to train on however many nodes between MIN and MAX are up
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts after a failure, by torchrun and by a scheduler that retries (local_cwd does not)
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, in place of cpu, gpu and memMB
        cpu: CPU cores per node
        gpu: GPUs per node
        memMB: memory per node in MiB
        env: environment for every rank (ex. NCCL_DEBUG=INFO,GLOO_SOCKET_IFNAME=eth0)
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where the ranks of several nodes meet
        debug: turn on torch's slow distributed checks
    """
    app = getattr(dist, "torchrun", dist.ddp)(
        *_flags(recipe, set, run_dir),
        *args,
        m="torchx_apps.train",
        j=_topology(j),
        name=name,
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=_environment(env, threads, max_retries),
        max_retries=max_retries,
        mounts=mounts,
        rdzv_port=rdzv_port,
        debug=debug,
    )
    for role in app.roles:
        role.args[-1] = _under_our_agent(role.args[-1], max_retries)
    return app


def _flags(recipe: str, override: Optional[str], run_dir: Optional[str]) -> List[str]:
    flags = ["--recipe", recipe]
    if override:
        flags.append(f"--set={override}")
    if run_dir:
        flags.append(f"--run-dir={run_dir}")
    return flags


def _topology(j: str) -> str:
    nodes, x, procs = j.partition("x")
    counts = [*nodes.split(":"), procs]
    if not x or len(counts) > 3 or not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise ValueError(f"-j {j}: write NODESxPROCS or MIN:MAXxPROCS in whole numbers from 1, such as -j 1x2 or -j 2:4x8")
    if len(counts) == 3 and int(counts[0]) > int(counts[1]):
        raise ValueError(f"-j {j}: MIN is {counts[0]} and MAX is {counts[1]}; write MIN:MAXxPROCS with MIN at most MAX")
    return j


def _environment(env: Optional[Dict[str, str]], threads: int, max_retries: int) -> Dict[str, str]:
    if threads < 1:
        raise ValueError(f"--threads {threads}: a rank needs at least one thread")
    if max_retries < 0:
        raise ValueError(f"--max_retries {max_retries}: write 0 for none, or how often to start again")
    ours = {"OMP_NUM_THREADS": str(threads)}
    if max_retries:
        # A restarted rank otherwise reads the dead one's address from the agent's store, and gloo cannot connect
        # (https://github.com/pytorch/pytorch/issues/135712).
        ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {**ours, **(env or {})}


def _under_our_agent(command: str, max_restarts: int) -> str:
    """Puts torchx_apps.agent, which is torchrun with one clear last word, where TorchX wrote torchrun.

    `exec`, so that the signals the scheduler sends reach the agent and not a shell.
    """
    rest = command[len("torchrun") :]
    return f"exec python3 -m torchx_apps.agent --max_restarts {max_restarts}{rest}"
