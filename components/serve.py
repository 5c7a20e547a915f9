"""Serve a trained model: export a run to a bundle, and answer requests from a bundle.

TorchX executes this file on its own, so it imports nothing but torchx and typing and names its app by string.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs


def export(
    *args: str,
    run: str,
    out: Optional[str] = None,
    index: str = "exact",
    store: str = "fp32",
    checkpoint: Optional[str] = None,
    recipe: Optional[str] = None,
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    name: str = "export",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Exports a run's best or last checkpoint to a bundle for serving, proven equal to the trained model.

    On this machine::

        torchx run rec.serve.export --run runs/two_tower-20261121-152815 --out bundle

    Args:
        args: further flags of torchx_apps.export, after -- (ex. -- --overwrite --recall 0.99)
        run: a run folder
        out: the bundle's folder; RUN/bundle where not given
        index: exact, or a text for FAISS's index_factory, such as IVF1024,Flat, for models that score by a product
        store: type of the stored rows: fp32 or fp16
        checkpoint: best (by train.early_stop.metric), last, a step, or a path; best where the run has marked one, else
            last
        recipe: my_recipe.py:job or my.module:job, where the run's recipe is not built in
        set: change one key of the recipe, such as data.folder=/data; give --set as often as you like
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores
        memMB: memory in MiB
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    flags = ["-m", "torchx_apps.export", run, f"--index={index}", f"--store={store}"]
    options = {
        "out": out,
        "checkpoint": checkpoint,
        "recipe": recipe,
        "set": set,
    }
    flags += [
        f"--{flag}={value}" for flag, value in options.items() if value is not None
    ]
    role = specs.Role(
        name="export",
        image=image,
        entrypoint="python3",
        args=[*flags, *args],
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        resource=specs.resource(cpu=cpu, memMB=memMB, gpu=0, h=h),
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])


def http(
    *args: str,
    bundle: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    token_file: Optional[str] = None,
    allowed_hosts: Optional[str] = None,
    vectors: Optional[str] = None,
    manifest: Optional[str] = None,
    replicas: int = 0,
    name: str = "serve",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 0,
    memMB: int = 0,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Serves a bundle over HTTP on one machine, with a page at / that shows recommendations; ends well on SIGTERM.

    The job is for one machine, this one or a node of Slurm::

        torchx run rec.serve.http --bundle runs/two_tower/bundle --workers 2

    On Kubernetes a service is no job: manifest writes a Deployment, a Service and a disruption budget for kubectl::

        torchx run -s kubernetes -cfg secret=serving rec.serve.http --manifest k8s --image my_image:1 \
            --mounts type=volume,src=bundles,dst=/bundles,readonly --bundle /bundles/live

    Args:
        args: further flags of torchx_apps.serve, after -- (ex. -- --max-k 100 --log events)
        bundle: a bundle's or a run's folder, a link to it, or a text file with its path; when the link or the file
            changes, the bundle that it then names is served
        host: address to listen on; 0.0.0.0 for all addresses of the machine, which a manifest takes by itself
        port: port to listen on; 0 for any that is free
        workers: number of processes that share the bundle's files
        token_file: file with the token that callers must send; where not given the variable TORCHREC_EXT_TOKEN, if set
        allowed_hosts: hosts that the header Host may name, by commas; by default this machine's names on a loopback
            host, else *
        vectors: folder of a store with users' vectors, as rec.embed --tower query writes one
        manifest: folder for the files of a service on Kubernetes, for `kubectl apply -f`; nothing is started
        replicas: pods of that service; 0 for 2
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu and memMB
        cpu: CPU cores; 0 for one per worker, at least 2
        memMB: memory in MiB; 0 for 512 per worker, at least 1024
        env: environment
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    if not 0 <= port < 65536:
        raise ValueError(
            f"--port {port}: must be 1 to 65535, or 0 for any that is free"
        )
    if workers < 1:
        raise ValueError(f"--workers {workers}: must be 1 or more")
    if replicas < 0 or (replicas and manifest is None):
        raise ValueError(
            f"--replicas {replicas}: the pods of --manifest, 1 or more; leave it out without --manifest"
        )
    # Nobody outside its pod would reach a loopback address.
    if manifest is not None and host == "127.0.0.1":
        host = "0.0.0.0"
    flags = [
        "-m",
        "torchx_apps.serve",
        bundle,
        f"--host={host}",
        f"--port={port}",
        f"--workers={workers}",
    ]
    options = {
        "token-file": token_file,
        "allowed-hosts": allowed_hosts,
        "vectors": vectors,
    }
    flags += [
        f"--{flag}={value}" for flag, value in options.items() if value is not None
    ]
    role = specs.Role(
        name="serve",
        image=image,
        entrypoint="python3",
        args=[*flags, *args],
        env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
        resource=specs.resource(
            cpu=cpu or max(2, workers),
            memMB=memMB or max(1024, 512 * workers),
            gpu=0,
            h=h,
        ),
        num_replicas=1 if manifest is None else replicas or 2,
        port_map={"http": port},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(
        name=name,
        roles=[role],
        metadata={} if manifest is None else {"manifest": manifest},
    )
