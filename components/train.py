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
    settings: Optional[str] = None,
    run_dir: Optional[str] = None,
    resume: Optional[str] = None,
    j: str = "1x2",
    threads: int = 1,
    max_retries: int = 0,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    rdzv_port: int = 0,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains a recipe, hybrid-parallel, on NODESxPROCS ranks.

    On this machine::

        torchx run rec.train.hybrid --recipe two_tower -j 1x2 \
            --set data.folder=my_data --set train.epochs=5

    On Slurm, inside the environment that is active when you submit::

        torchx run -s slurm -cfg partition=gpu,time=02:00:00 rec.train.hybrid -j 2x8 --gpu 8

    On Kubernetes with Volcano, in an image that has this package::

        torchx run -s kubernetes -cfg queue=default rec.train.hybrid --image my_image:1 -j 2x4 --gpu 4 \
            --mounts type=volume,src=runs,dst=/runs --run_dir /runs/two_tower --max_retries 3

    Args:
        args: further flags of torchx_apps.train, after -- (ex. -- --dry-run)
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        set: change one key of the recipe, such as loader.batch_size=4096; give --set as often as you like
        settings: a TOML file of such changes, [loader] with batch_size = 4096; those of set come after it
        run_dir: folder for checkpoints, metrics and plan; on several nodes one that all of them see
        resume: auto for the last good checkpoint of run_dir, or of the recipe's newest run; or the path of another run
        j: NODESxPROCS, or MIN:MAXxPROCS to train on however many nodes between MIN and MAX are up
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts from the last checkpoint, by torchrun and by a scheduler that retries (local_cwd does not)
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores per node; 0 for one per thread of each rank, at least 2, and 4 per rank on a GPU
        gpu: GPUs per node, one for each of its ranks
        memMB: memory per node in MiB; 0 for 2048 per rank, at least 4096, and 8192 per rank on a GPU
        env: environment for every rank (ex. NCCL_DEBUG=INFO,GLOO_SOCKET_IFNAME=eth0)
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where the ranks of several nodes meet; 0 for one of 20000 to 29999 made of the
            job's id
        debug: turn on torch's slow distributed checks
    """
    return _app(
        "torchx_apps.train",
        [*_flags(recipe, set, settings, run_dir, resume), *args],
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
        debug=debug,
    )


def networks(
    *args: str,
    recipe: str = "two_tower",
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    settings: Optional[str] = None,
    vary: Optional[str] = None,
    member: Optional[str] = None,
    groups: Optional[str] = None,
    own_rows: bool = False,
    stack: str = "auto",
    codistill: Optional[str] = None,
    weights: bool = False,
    run_dir: Optional[str] = None,
    resume: Optional[str] = None,
    j: str = "1x2",
    threads: int = 1,
    max_retries: int = 0,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    rdzv_port: int = 0,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains several networks in one job: those of one shape as a stack, others at the same time on groups of ranks.

    All combinations of some settings, each combination a network, and a table with the best at the end::

        torchx run rec.train.networks -j 1x2 \
            --vary optimizer.dense_lr=1e-3,3e-3 --vary train.seed=0,1,2

    Listed networks on given ranks::

        torchx run rec.train.networks --member "small:model.tower_widths=64" \
            --member "large:model.tower_widths=512,256,64" -j 1x3 --groups large:0-1,small:2

    Only print which network would be trained on which ranks::

        torchx run rec.train.networks --vary train.seed=0,1,2 -- --list

    Args:
        args: further flags of torchx_apps.train_networks, after -- (ex. -- --dry-run)
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        set: change one key of the recipe for all members; give --set as often as you like
        settings: a TOML file of such changes, [loader] with batch_size = 4096; those of set come after it
        vary: KEY=A,B, one member for each value (A|B for values with commas); given several times, for all combinations
        member: NAME:KEY=A,KEY=B, a further member; give --member as often as you like
        groups: ranks that train each member (ex. large:0-1,small*:2); shared out evenly where not given
        own_rows: each member reads in the order of its train.seed, instead of one loader for all
        stack: auto, require (members that cannot be stacked are refused) or never
        codistill: stacked members learn from each other (ex. weight=1,burn_in=1000,every=100)
        weights: write each stacked member's state dict as weights.pt
        run_dir: folder for the table, the picture and a run folder of each member; on several nodes one that all of
            them see
        resume: auto to continue in run_dir, or in the recipe's newest folder: members that have ended stay as they are
        j: NODESxPROCS, or MIN:MAXxPROCS to train on however many nodes between MIN and MAX are up
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts from the last checkpoint, by torchrun and by a scheduler that retries (local_cwd does not)
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores per node; 0 for one per thread of each rank, at least 2, and 4 per rank on a GPU
        gpu: GPUs per node, one for each of its ranks
        memMB: memory per node in MiB; 0 for 2048 per rank, at least 4096, and 8192 per rank on a GPU
        env: environment for every rank (ex. CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50)
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where the ranks of several nodes meet; 0 for one of 20000 to 29999 made of the
            job's id
        debug: turn on torch's slow distributed checks
    """
    if groups and ":" in j:
        raise ValueError(
            f"--groups {groups} with -j {j}: it names ranks, whose number changes with the nodes that are up; leave it "
            f"out, or write -j {j.partition(':')[2]}"
        )
    options = [
        ("vary", vary),
        ("member", member),
        ("groups", groups),
        ("codistill", codistill),
    ]
    flags = [f"--{flag}={text}" for flag, text in options if text]
    if own_rows:
        flags.append("--own-rows")
    if weights:
        flags.append("--weights")
    return _app(
        "torchx_apps.train_networks",
        [
            *_flags(recipe, set, settings, run_dir, resume),
            *flags,
            f"--stack={stack}",
            *args,
        ],
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
        debug=debug,
    )


def stream(
    *args: str,
    log: Optional[str] = None,
    recipe: str = "two_tower",
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    settings: Optional[str] = None,
    run_dir: Optional[str] = None,
    resume: Optional[str] = None,
    until_idle: Optional[float] = None,
    events: Optional[int] = None,
    publish_s: float = 10.0,
    bundles: Optional[str] = None,
    keep: int = 3,
    j: str = "1x1",
    threads: int = 1,
    max_retries: int = 0,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    rdzv_port: int = 0,
    debug: bool = False,
) -> specs.AppDef:
    r"""Trains on a log as its files come, each event once and in order, and publishes a bundle every few seconds.

    Follow a folder into which .jsonl, .csv and .parquet files are renamed, and serve what was learned seconds ago::

        torchx run rec.train.stream --log clicks --run_dir runs/clicks --resume auto --set data.label=clicked \
            --set loader.negatives=0
        torchx run rec.serve.http --bundle runs/clicks/bundles/current -- --watch 0.2

    Train today's log to its end, and tomorrow go on with the next one::

        torchx run rec.train.stream --log clicks --run_dir runs/clicks --resume auto --until_idle 5

    Args:
        args: further flags of torchx_apps.train_stream, after -- (ex. -- --dry-run)
        log: folder of the log's files, read in the order of their names, each as a whole
        recipe: a built-in recipe, my_recipe.py:job or my.module:job
        set: change one key of the recipe, such as data.label=clicked; give --set as often as you like
        settings: a TOML file of such changes, [data] with label = "clicked"; those of set come after it
        run_dir: folder for checkpoints, bundles and metrics
        resume: auto for the last good checkpoint of run_dir, or of the recipe's newest run; or the path of another run
        until_idle: end after these seconds without a new event; without it the run follows the log until SIGTERM
        events: end after this number of events, with those before a resume
        publish_s: seconds between two bundles; 0 for one at the end
        bundles: folder of the bundles, instead of run_dir's; its file current names the newest
        keep: bundles to keep
        j: 1x1, because a log is trained on one rank yet
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts from the last checkpoint, by torchrun and by a scheduler that retries (local_cwd does not)
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores per node; 0 for one per thread of each rank, at least 2, and 4 per rank on a GPU
        gpu: GPUs per node, one for each of its ranks
        memMB: memory per node in MiB; 0 for 2048 per rank, at least 4096, and 8192 per rank on a GPU
        env: environment for every rank (ex. MALLOC_ARENA_MAX=2)
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where the ranks of several nodes meet; 0 for one of 20000 to 29999 made of the
            job's id
        debug: turn on torch's slow distributed checks
    """
    if j != "1x1":
        raise ValueError(f"-j {j}: a log is trained on one rank yet; leave -j out")
    options = {
        "until-idle": until_idle,
        "events": events,
        "bundles": bundles,
        "resume": resume,
    }
    flags = [
        f"--{flag}={value}" for flag, value in options.items() if value is not None
    ]
    if log is not None:
        # Not --log: torchrun's parser finds that ambiguous even behind the script, with
        # its own --log-dir.
        flags.append(f"--set=data.folder={log}")
    return _app(
        "torchx_apps.train_stream",
        [
            *_flags(recipe, set, settings, run_dir),
            *flags,
            f"--publish-s={publish_s}",
            f"--keep={keep}",
            *args,
        ],
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
        debug=debug,
    )


# The quotes keep it from TorchX's list of components, which are all functions annotated
# with AppDef itself.
def _app(
    main: str,
    flags: List[str],
    j: str,
    threads: int,
    max_retries: int,
    name: str,
    image: str,
    h: Optional[str],
    cpu: int,
    gpu: int,
    memMB: int,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]],
    mounts: Optional[List[str]],
    rdzv_port: int,
    debug: bool,
) -> "specs.AppDef":
    variables = _environment(env, threads, max_retries, elastic=j if ":" in j else "")
    procs = int(_topology(j).rpartition("x")[2])
    gpus = specs.resource(h=h).gpu if h else gpu
    if gpus and gpus != procs:
        resource = f"--gpu {gpu}"
        remedy = f"write -j {j.rpartition('x')[0]}x{gpus} or --gpu {procs}"
        if h:
            resource = f"-h {h}, which has {gpus}"
            remedy = f"write -j {j.rpartition('x')[0]}x{gpus}"
        raise ValueError(
            f"-j {j} with {resource}: each of a node's {procs} ranks needs a GPU of its own, and each GPU a rank; "
            f"{remedy}"
        )
    if not 0 <= rdzv_port < 65536:
        raise ValueError(
            f"--rdzv_port {rdzv_port}: must be 1 to 65535, or 0 for a port made of the job's id"
        )
    app = getattr(
        dist, "torchrun", dist.ddp
    )(
        *flags,
        m=main,
        tee=2,  # prefixes a rank's stderr with its number; its stdout is the job's result, and stays as it is
        j=j,
        name=name,
        image=image,
        h=h,
        cpu=cpu or max(2, procs * max(threads, 4 if gpus else 1)),
        gpu=gpu,
        memMB=memMB or max(4096, procs * (8192 if gpus else 2048)),
        env=variables,
        max_retries=max_retries,
        mounts=mounts,
        rdzv_port=rdzv_port,
        debug=debug,
    )
    for role in app.roles:
        role.args[-1] = _under_our_agent(role.args[-1], max_retries)
        if not rdzv_port:
            # The agent derives the port from the job's id.
            role.port_map = {}
    return app


def _flags(
    recipe: str,
    override: Optional[str],
    settings: Optional[str],
    run_dir: Optional[str],
    resume: Optional[str] = None,
) -> List[str]:
    options = {
        "settings": settings,
        "set": override,
        "run-dir": run_dir,
        "resume": resume,
    }
    return [
        "--recipe",
        recipe,
        *(f"--{flag}={value}" for flag, value in options.items() if value),
    ]


def _topology(j: str) -> str:
    nodes, x, procs = j.partition("x")
    counts = [*nodes.split(":"), procs]
    if (
        not x
        or len(counts) > 3
        or not all(count.isdecimal() and int(count) > 0 for count in counts)
    ):
        raise ValueError(
            f"-j {j}: write NODESxPROCS or MIN:MAXxPROCS in whole numbers from 1, such as -j 1x2 or -j 2:4x8"
        )
    if len(counts) == 3 and int(counts[0]) > int(counts[1]):
        raise ValueError(
            f"-j {j}: MIN is {counts[0]} and MAX is {counts[1]}; write MIN:MAXxPROCS with MIN at most MAX"
        )
    return j


def _environment(
    env: Optional[Dict[str, str]], threads: int, max_retries: int, elastic: str
) -> Dict[str, str]:
    if threads < 1:
        raise ValueError(f"--threads {threads}: a rank needs at least one thread")
    if max_retries < 0:
        raise ValueError(
            f"--max_retries {max_retries}: write 0 for none, or how often to start again"
        )
    # Unbuffered, or a pod's log stays empty for minutes.
    ours = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if max_retries or elastic:
        # Gives each attempt a store of its own. In the agents' store, which outlives
        # the ranks, a restarted rank reads the dead one's address and gloo cannot
        # connect (https://github.com/pytorch/pytorch/issues/135712). Ranks also use
        # their host's count of restarts as key, which differs between hosts after the
        # first fault, so that they would wait for each other.
        ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if elastic:
        # The ranks then refuse settings that need a fixed number of ranks.
        ours["TORCHREC_EXT_ELASTIC"] = elastic
    variables = {**ours, **(env or {})}
    if "PET_RDZV_CONF" in variables:
        # torchrun's, NAME=VALUE by commas; TorchX takes no "=" within a value
        variables["PET_RDZV_CONF"] = variables["PET_RDZV_CONF"].replace(":", "=")
    return variables


def _under_our_agent(command: str, max_restarts: int) -> str:
    """Replaces torchrun in TorchX's command by torchx_apps.agent: torchrun with one clear last word.

    `exec`, so that the signals the scheduler sends reach the agent and not a shell. A node whose python3 lacks the
    package ends with the exit code of a mistake, which is not tried again, and leaves the file that says so for Slurm.
    """
    rest = command[len("torchrun") :]
    lacking = (
        "$HOSTNAME: this node, or its image, has no python3 with the package torchrec_ext; install it there, or submit "
        "from a folder and an environment that every node sees"
    )
    return (
        'python3 -c "import torchx_apps" 2> /dev/null || '
        f'{{ echo "{lacking}" >&2; : > "${{TORCHREC_EXT_MISTAKE_FILE:-/dev/null}}"; exit 200; }}; '
        f"exec python3 -m torchx_apps.agent --max_restarts {max_restarts}{rest}"
    )
