"""Serve a trained model: export a run to a bundle, store its vectors, and answer requests from it.

TorchX executes this file on its own, so it imports torchx and typing, and an app only inside of a function.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs


def export(
    *args: str,
    run: str,
    name: str = "export",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Exports a run's best or last checkpoint to a bundle for serving, proven equal to the trained model.

    On this machine::

        torchx run -s local_cwd rec.serve.export --run runs/two_tower-20261121-152815 -- --out bundle

    Args:
        args: flags of torchx_apps.export, behind --, such as -- --out bundle --store fp16 --index IVF1024,Flat
        run: a run folder
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores
        gpu: GPUs
        memMB: memory in MiB
        env: environment
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    return _process(
        "torchx_apps.export",
        [run, *args],
        name=name,
        image=image,
        env=env,
        mounts=mounts,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
    )


def embed(
    *args: str,
    bundle: str,
    name: str = "embed",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 2048,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Runs one side of a bundle over a catalogue of parquet files, into a store of vectors by id.

    On this machine::

        torchx run -s local_cwd rec.serve.embed --bundle runs/a/bundle -- --catalogue items.parquet --id item_id --out v
        torchx run -s local_cwd rec.serve.embed --bundle runs/a/bundle -- --tower query --out users

    Args:
        args: flags of torchx_apps.embed, behind --, such as -- --catalogue items.parquet --id item_id --out vectors
        bundle: a bundle's folder, or a run folder with one
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores
        gpu: GPUs
        memMB: memory in MiB
        env: environment
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    return _process(
        "torchx_apps.embed",
        [bundle, *args],
        name=name,
        image=image,
        env=env,
        mounts=mounts,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
    )


def http(
    *args: str,
    bundle: str,
    port: int = 8000,
    name: str = "serve",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803  (TorchX's own spelling)
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    r"""Serves a bundle over HTTP on one machine, with a page at / that shows recommendations; ends well on SIGTERM.

    On this machine::

        torchx run -s local_cwd rec.serve.http --bundle runs/two_tower/bundle -- --workers 2

    On Kubernetes a service is no job: see examples/k8s.

    Args:
        args: flags of torchx_apps.serve, behind --, such as -- --workers 2 --host 0.0.0.0
        bundle: a bundle's or a run's folder, a link to it, or a text file with its path; when the link or the file
            changes, the bundle that it then names is served
        port: port to listen on; 0 for any that is free
        name: name of the job
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores
        gpu: GPUs
        memMB: memory in MiB
        env: environment
        mounts: mounts (ex. type=bind,src=/host,dst=/job,readonly)
    """
    return _process(
        "torchx_apps.serve",
        [bundle, "--port", str(port), *args],
        name=name,
        image=image,
        env=env,
        mounts=mounts,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        port_map={"http": port},
    )


# The quotes keep it from TorchX's list of components, which are all functions annotated
# with AppDef itself.
def _process(
    main: str,
    words: List[str],
    name: str,
    image: str,
    env: Optional[Dict[str, str]],
    mounts: Optional[List[str]],
    resource: specs.Resource,
    port_map: Optional[Dict[str, int]] = None,
) -> "specs.AppDef":
    role = specs.Role(
        name=name,
        image=image,
        entrypoint="python3",
        args=["-m", main, *words],
        # Unbuffered, or a pod's log stays empty for minutes.
        env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
        resource=resource,
        port_map=port_map or {},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
