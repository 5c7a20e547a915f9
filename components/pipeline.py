"""Preprocess, train and export as one job, which goes on in the stage where it was stopped.

TorchX executes this file on its own, so it imports nothing but torchx, typing and the component that trains.
"""

from typing import Dict, List, Optional

import torchx
from torchrec_ext.components.train import _app
from torchx import specs


def all(  # noqa: A001  (rec.pipeline.all)
    *args: str,
    out: str,
    preprocess: str = "ml_100k",
    recipe: str = "stream",
    set: Optional[str] = None,  # noqa: A002  (the flag is --set)
    settings: Optional[str] = None,
    engine: Optional[str] = None,
    index: Optional[str] = None,
    store: Optional[str] = None,
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
    r"""Makes a served model of a log: preprocesses on one rank, trains on all and exports on one, to data, run, bundle.

    On this machine, and the same line again where it was stopped::

        torchx run rec.pipeline.all --out taobao -j 1x2 \
            --preprocess taobao --set preprocess.config.path=UserBehavior.csv \
            --recipe bst --set train.epochs=2

    Args:
        args: further flags of torchx_apps.pipeline, after -- (ex. -- --dry-run)
        out: folder for the folders data, run and bundle; on several nodes one that all of them see. A stage whose
            folder is whole is left out; one that was made with other settings is refused
        preprocess: a built-in recipe of rec.data.preprocess, my_recipe.py:job or my.module:job
        recipe: a built-in recipe of rec.train.hybrid that reads preprocessed rows, my_recipe.py:job or my.module:job
        set: change one key of the training, such as train.epochs=2, or with preprocess. before it one of the
            preprocessing; give --set as often as you like
        settings: a TOML file of such changes, [loader] with batch_size = 4096; those of set come after it
        engine: duckdb, spark (the session that is configured there) or a Spark master URL, for the preprocessing
        index: exact, or a text for FAISS's index_factory, such as IVF1024,Flat, for models that score by a product
        store: type of the stored rows: fp32 or fp16
        j: NODESxPROCS, or MIN:MAXxPROCS to train on however many nodes between MIN and MAX are up
        threads: OpenMP threads per rank; one is fastest on small models
        max_retries: restarts, each in the stage that failed, by torchrun and by a scheduler that retries
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN
        image: container image; local and Slurm schedulers use the current folder and environment instead
        h: a named resource, instead of cpu, gpu and memMB
        cpu: CPU cores per node; 0 for one per thread of each rank, at least 2, and 4 per rank on a GPU
        gpu: GPUs per node, one for each of its ranks
        memMB: memory per node in MiB; 0 for 2048 per rank, at least 4096, and 8192 per rank on a GPU
        env: environment for every rank (ex. SPARK_HOME=/opt/spark)
        mounts: container mounts (ex. type=bind,src=/host,dst=/job,readonly)
        rdzv_port: port on the first node where the ranks of several nodes meet; 0 for one of 20000 to 29999 made of the
            job's id
        debug: turn on torch's slow distributed checks
    """
    options = {
        "engine": engine,
        "index": index,
        "store": store,
        "set": set,
    }
    options["settings"] = settings
    flags = ["--recipe", recipe, f"--preprocess={preprocess}", f"--out={out}"]
    flags += [
        f"--{flag}={value}" for flag, value in options.items() if value is not None
    ]
    return _app(
        "torchx_apps.pipeline",
        [*flags, *args],
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
