"""run(): data, model and ranks meet here: load, plan, shard, train, evaluate, report."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.batches import BatchBuilder
from torchrec_ext.data.datasets import DatasetUnavailable, load_config
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.loader import ChunkLoader, LoaderConfig, labelled_rows, training_loader
from torchrec_ext.distributed.explain import explain
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.planning import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.loop import Record, train
from torchrec_ext.train.run_folder import RunFolder
from torchx_apps import report
from torchx_apps.recipes import Job

K = 10


def run(job: Job, run_dir: Path | None = None) -> None:
    """Trains ``job`` on this process's share of the ranks; rank 0 prints and writes the run folder."""
    _quieten_libraries()
    with Runtime.start(job.device, threads=job.threads) as runtime:
        data = load_data(job, runtime)
        job = dataclasses.replace(job, data=dataclasses.replace(job.data, name=data.name))  # after a fallback another one
        _check(job, data)
        folder = _open_folder(job, run_dir) if runtime.is_main else None
        torch.manual_seed(job.train.seed)
        model = job.build(job.model, data)
        schema = model.schema(out_of_range=job.model.out_of_range)
        rows = -(-job.loader.batch_size // runtime.world_size) * (1 + job.loader.negatives)
        plan = plan_sharding(model, runtime, job.plan, optimizer=job.optimizer, batch_size=rows)
        plan_text = explain(plan, model, runtime.world_size)
        if folder is not None:
            report.say_start(data, runtime, plan_text)
            folder.write("plan.txt", plan_text)
        parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=job.optimizer, seed=job.train.seed)
        torch.manual_seed(job.train.seed + 1 + runtime.rank)  # for dropout, which should differ between ranks
        # train.seed moves everything; loader.seed moves the order and the negatives alone.
        loader_config = dataclasses.replace(job.loader, seed=job.train.seed + job.loader.seed)
        loader = training_loader(data, schema, loader_config, rank=runtime.rank, world_size=runtime.world_size)
        judge = Judge(data, schema, parallel, runtime)
        start = time.perf_counter()
        history = train(
            parallel,
            optimizer,
            loader,
            runtime,
            job.train,
            evaluate=judge.validate,
            log=folder.log if folder is not None else None,
        )
        seconds = time.perf_counter() - start
        figures = judge.test()
        recommended = judge.recommend()
        memory = peak_memory(runtime)
        if folder is not None:
            report.finish(folder, data, figures, judge.popularity("test"), recommended, history, seconds, memory)
            report.say_end(folder.path, folder.close(judge.popularity("validation")))


def peak_memory(runtime: Runtime) -> float:
    """MiB of resident memory that the largest rank has had at most; on a GPU of device memory."""
    if runtime.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(runtime.device) / 2**20
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    largest = torch.tensor(used, device=runtime.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def load_data(job: Job, runtime: Runtime) -> InteractionData:
    """The job's data on every rank; one rank of each host looks and downloads first, and all share its outcome."""
    reason = None
    if runtime.local_rank == 0:
        try:
            data = load_config(job.data, progress=runtime.is_main)
        except DatasetUnavailable as error:
            reason = str(error)
    reasons: list[str | None] = [None] * runtime.world_size
    dist.all_gather_object(reasons, reason)
    reason = next((found for found in reasons if found), None)
    if reason is None:
        return data if runtime.local_rank == 0 else load_config(job.data, progress=False)
    if job.fallback is None:
        raise DatasetUnavailable(reason)
    if runtime.is_main:
        print(f"note: training on the generated set '{job.fallback}' instead: {reason}")
    return load_config(dataclasses.replace(job.data, name=job.fallback))


def _check(job: Job, data: InteractionData) -> None:
    """Refuses what would train or evaluate on nothing."""
    if job.loader.negatives == 0 and not job.loader.label:
        raise ValueError(
            "loader.negatives=0 without loader.label: every row would have label 1, from which nothing can be learned; "
            "draw negatives, or name the column with the labels"
        )
    for part in ("validation", "test"):
        if not getattr(data, part).num_rows:
            raise ValueError(f"set '{data.name}' has no {part} rows: no user has the 3 interactions that a split by time needs")


def _quieten_libraries() -> None:
    """Keeps what torch and torchrec say to their own developers, on every rank, out of a user's log; LOGLEVEL=INFO shows it."""
    if os.environ.get("LOGLEVEL", "WARNING").upper() in ("INFO", "DEBUG"):
        return
    logging.getLogger().setLevel(logging.ERROR)
    for library in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(library).setLevel(logging.ERROR)
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"{library}\b")


def _open_folder(job: Job, run_dir: Path | None) -> RunFolder:
    config = dataclasses.asdict(dataclasses.replace(job, build=None))  # type: ignore[arg-type]
    config["build"] = f"{job.build.__module__}:{job.build.__qualname__}"
    path = run_dir or Path("runs") / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return RunFolder(path, config, replace=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)


@dataclass(frozen=True)
class Recommended:
    """What one user would be shown: ``user`` id, ``items`` (K,) ids, best first, and their ``scores``."""

    user: int
    items: list[int]
    scores: list[float]


class Judge:
    """The figures of a model on the held-out items of ``data``; every rank calls each method but :meth:`popularity`."""

    def __init__(self, data: InteractionData, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime) -> None:
        self._data, self._schema, self._model, self._runtime = data, schema, model, runtime
        self._builder = BatchBuilder(schema, data.items)
        self._labelled = {part: labelled_rows(data, part) for part in ("validation", "test")}

    def validate(self) -> Record:
        """AUC, HR@10 and NDCG@10 on the validation items."""
        return self._figures("validation", ("train",))

    def test(self) -> Record:
        """The same on the test items, with the validation items seen."""
        self._model.eval()
        return self._figures("test", ("train", "validation"))

    def popularity(self, part: str) -> Record:
        """HR@10 and NDCG@10 of the popularity ranking on the same items and candidates."""
        seen = ("train",) if part == "validation" else ("train", "validation")
        return metrics.popularity_metrics(torch.from_numpy(self._data.popularity()), self._question(part, seen), K)

    def recommend(self, user_row: int = 0) -> Recommended:
        """The K best items for the user of one test row, fewer where that user has taken all but those."""
        row = self._data.test.slice(user_row, user_row + 1)
        user = row["user_id"].values
        model = self._model.module
        with torch.no_grad():
            items = self._catalogue()
            vector = model.embed("user", self._builder.user_batch(row).to(self._runtime.device))
            scores = model.interaction.score_all(vector, items)[0].cpu()
        scores[0] = -torch.inf
        scores[torch.from_numpy(self._data.seen(user, "train", "validation").values)] = -torch.inf
        best = scores.topk(min(K, int((scores > -torch.inf).sum())))
        return Recommended(int(user[0]), best.indices.tolist(), best.values.tolist())

    def _figures(self, part: str, seen: tuple[str, ...]) -> Record:
        chunk = getattr(self._data, part)
        shares = metrics.own_share(chunk.num_rows, self._runtime)
        ranks = metrics.catalogue_ranks(
            self._model.module,
            self._runtime,
            ((self._builder.user_batch(chunk.slice(rows.start, rows.stop)), keep) for rows, keep in shares),
            self._item_batches(),
            self._question(part, seen),
        )
        return {"auc": self._auc(part), **metrics.ranking_metrics(ranks, K)}

    def _auc(self, part: str) -> float:
        config = LoaderConfig(batch_size=4096, negatives=0, label="label", shuffle=False)
        rank, world_size = self._runtime.rank, self._runtime.world_size
        loader = ChunkLoader(
            self._labelled[part], self._schema, config=config, items=self._data.items, rank=rank, world_size=world_size
        )
        with torch.no_grad():
            outputs = [self._model.module(batch.to(self._runtime.device))[1] for batch in loader]
        columns = (torch.cat([getattr(output, name) for output in outputs]) for name in ("logits", "labels", "weights"))
        return metrics.auc(*columns, self._runtime)

    def _question(self, part: str, seen: tuple[str, ...]) -> metrics.Question:
        chunk = getattr(self._data, part)
        taken = self._data.seen(chunk["user_id"].values, *seen)
        return metrics.Question(
            targets=torch.from_numpy(chunk["item_id"].values),
            seen_rows=torch.from_numpy(np.arange(len(taken)).repeat(taken.lengths)),
            seen_items=torch.from_numpy(taken.values),
        )

    def _item_batches(self) -> Any:
        ids = np.arange(self._data.items.num_rows)
        return ((self._builder.item_batch(ids[rows]), keep) for rows, keep in metrics.own_share(len(ids), self._runtime))

    def _catalogue(self) -> torch.Tensor:
        return metrics.embed_all(self._model.module, "item", self._item_batches(), self._runtime)
