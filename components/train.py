"""Train a recipe hybrid-parallel: sharded tables, replicated or tower-parallel dense layers.

TorchX executes this file on its own, so it imports torchx and typing, and an app only inside of a function.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs
from torchx.components import dist


def hybrid(
    *args: str,
    recipe: str = "two_tower",
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
    metadata: Optional[Dict[str, str]] = None,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains a recipe, hybrid-parallel, on NODESxPROCS ranks.

    On this machine::

        torchx run -s local_cwd rec.train.hybrid -j 1x2 --recipe two_tower -- --data.name planted --train.epochs 5

    On Slurm, inside the environment that is active when you submit::

        torchx run -s slurm -cfg partition=gpu,time=02:00:00 rec.train.hybrid -j 2x8 --gpu 8

    Args:
        args: flags of torchx_apps.train, behind --, such as -- --run_dir runs/a --train.epochs 5
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        j: NODESxPROCS, or MIN:MAXxPROCS for as many nodes between MIN and MAX as are up
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts from the last checkpoint of --run_dir, by torchrun and by a scheduler that retries
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores per node
        gpu: GPUs per node
        memMB: memory per node in MiB
        env: environment for every rank (ex. NCCL_DEBUG=INFO,GLOO_SOCKET_IFNAME=eth0)
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where several nodes meet; two jobs with one first node need two
        metadata: what a scheduler reads besides (ex. kubernetes=file:///path/to/pod_overlay.yaml)
        debug: turn on torch's slow distributed checks
    """
    return _ranks(
        "torchx_apps.train",
        ["--recipe", recipe, *args],
        j=j,
        threads=threads,
        max_retries=max_retries,
        name=name,
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        rdzv_port=rdzv_port,
        metadata=metadata,
        debug=debug,
    )


def networks(
    *args: str,
    vary: str = "",
    recipe: str = "two_tower",
    j: str = "1x1",
    threads: int = 0,
    max_retries: int = 0,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    metadata: Optional[Dict[str, str]] = None,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains the members of a grid at the same time, each as rec.train.hybrid does, and compares them in a table.

    Three seeds, and a grid of four members::

        torchx run -s local_cwd rec.train.networks --vary train.seed 0 1 2 -- --data.name planted
        torchx run -s local_cwd rec.train.networks --vary optimizer.dense_lr 1e-3 3e-3 train.seed 0 1 -- \
            --run_dir runs/grid

    Each member is a role of the job, with a run folder in --run_dir. The member that ends last makes the table.

    Args:
        args: further words of --vary, then -- and flags of torchx_apps.train, which all members have
        vary: KEY VALUE VALUE, and perhaps more keys: a member for each combination; it stands last before --
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        j: 1xPROCS, the ranks of each member, on one node
        threads: OpenMP threads per rank; 0 shares the cores of the machine where you type this among all ranks
        max_retries: restarts from the last checkpoint of each member, by torchrun and by a scheduler that retries
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource for each member, instead of cpu, gpu and memMB
        cpu: CPU cores per member
        gpu: GPUs per member
        memMB: memory per member in MiB
        env: environment for every rank (ex. NCCL_DEBUG=INFO,GLOO_SOCKET_IFNAME=eth0)
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
        metadata: what a scheduler reads besides (ex. kubernetes=file:///path/to/pod_overlay.yaml)
        debug: turn on torch's slow distributed checks
    """
    # Imported here, because TorchX executes this file on its own.
    from torchx_apps.networks.members import fair_threads, roles_or_exit

    members = roles_or_exit(vary, args, recipe, j)
    roles = []
    for member in members:
        app = _ranks(
            "torchx_apps.train_networks",
            list(member.words),
            j=j,
            threads=threads or fair_threads(len(members), j),
            max_retries=max_retries,
            name=name,
            image=image,
            h=h,
            cpu=cpu,
            gpu=gpu,
            memMB=memMB,
            env=env,
            mounts=mounts,
            metadata=metadata,
            debug=debug,
        )
        app.roles[0].name = member.name
        roles += app.roles
    return specs.AppDef(name=app.name, roles=roles)


def stream(
    *args: str,
    recipe: str = "two_tower",
    j: str = "1x1",
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
    metadata: Optional[Dict[str, str]] = None,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains on a log as its files come, each event once and in order, and publishes a bundle every few seconds.

    Follow a folder into which files of JSON lines are renamed, and serve what was learned seconds ago::

        torchx run -s local_cwd rec.train.stream -- --data.folder clicks --run_dir runs/clicks
        torchx run -s local_cwd rec.serve.http --bundle runs/clicks/bundles/current -- --watch 0.2

    Args:
        args: flags of torchx_apps.train_stream, behind --, such as -- --run_dir runs/a --train.epochs 5
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        j: NODESxPROCS, or MIN:MAXxPROCS for as many nodes between MIN and MAX as are up
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts from the last checkpoint of --run_dir, by torchrun and by a scheduler that retries
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores per node
        gpu: GPUs per node
        memMB: memory per node in MiB
        env: environment for every rank (ex. NCCL_DEBUG=INFO,GLOO_SOCKET_IFNAME=eth0)
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where several nodes meet; two jobs with one first node need two
        metadata: what a scheduler reads besides (ex. kubernetes=file:///path/to/pod_overlay.yaml)
        debug: turn on torch's slow distributed checks
    """
    return _ranks(
        "torchx_apps.train_stream",
        ["--recipe", recipe, *args],
        j=j,
        threads=threads,
        max_retries=max_retries,
        name=name,
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        rdzv_port=rdzv_port,
        metadata=metadata,
        debug=debug,
    )


# The quotes keep it from TorchX's list of components, which are all functions annotated
# with AppDef itself.
def _ranks(
    main: str,
    words: List[str],
    j: str,
    threads: int,
    max_retries: int,
    env: Optional[Dict[str, str]],
    metadata: Optional[Dict[str, str]],
    **more: object,
) -> "specs.AppDef":
    # Imported here, because TorchX executes this file on its own.
    from torchx_apps.config import refuse_mistakes

    refuse_mistakes(main, words)
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if max_retries:
        # torchrun's --max_restarts, which dist.ddp does not pass on.
        variables["PET_MAX_RESTARTS"] = str(max_retries)
    if max_retries or ":" in j:
        # Gives each attempt a store of its own: in the agents' store a restarted rank
        # finds the dead one's address (https://github.com/pytorch/pytorch/issues/135712).
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    app = dist.ddp(
        *words,
        m=main,
        j=j,
        max_retries=max_retries,
        env={**variables, **(env or {})},
        # Prefixes stderr with the rank's number; its stdout is the job's result.
        tee=2,
        **more,
    )
    app.roles[0].metadata.update(metadata or {})
    return app
