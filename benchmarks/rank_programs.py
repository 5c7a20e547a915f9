"""Programs of several ranks, each with one cause of lost time, or with none, and their diagnosis.

    torchrun --nproc-per-node 2 benchmarks/rank_programs.py NAME [SEED] [BUDGET_S]

Rank 0 prints the page, and as the last line one JSON object: the verdict, the ranks that it names, and the seconds. A
slow link and a long way of messages are made by `lagging()`: a library in front of libc's `sendmsg` waits before gloo
sends, so that a collective is slow and the ranks' own threads are not.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_ext.diagnose import why_slow

SLOW = 1  # rank that is slow, where one is
SLEEP_S = 0.03
LAG = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>
static void lag(size_t bytes) {
  char name[32] = {0};
  const char *ranks = getenv("LAG_RANKS"), *rank = getenv("RANK");
  prctl(PR_GET_NAME, name);
  if ((!strncmp(name, "pt_gloo", 7) || !strncmp(name, "gloo_tcp", 8)) && ranks && rank && strstr(ranks, rank))
    usleep((useconds_t)(atof(getenv("LAG_US")) + bytes * atof(getenv("LAG_US_PER_BYTE"))));
}
ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
  size_t bytes = 0;
  for (size_t i = 0; i < message->msg_iovlen; i++) bytes += message->msg_iov[i].iov_len;
  lag(bytes);
  return ((ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg"))(file, message, flags);
}
ssize_t writev(int file, const struct iovec *pieces, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += pieces[i].iov_len;
  lag(bytes);
  return ((ssize_t (*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev"))(file, pieces, count);
}
"""


class Parts(NamedTuple):
    """What one rank diagnoses: a step function, its batches, and what it trains."""

    step: Callable[..., object]
    batches: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Case(NamedTuple):
    """A program: a function of the rank, the cause that is planted, the rank that is slow, and how messages lag."""

    make: Callable[[int], Parts]
    cause: str = ""
    slow: int | None = None
    lag: dict[str, str] = {}  # noqa: RUF012


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def usual(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batches: Any,
    after: Callable[[], object] = int,
) -> Parts:
    """The usual step; ``after`` is called between the backward and the optimizer's step."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(*batch: Tensor) -> None:
        optimizer.zero_grad()
        loss(*batch).backward()
        after()
        optimizer.step()

    return Parts(step, batches, model, optimizer)


def batches_of(rank: int, rows: int, width: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(rows, width, generator=generator),
            torch.rand(rows, 1, generator=generator).round(),
        )
        for _ in range(8)
    ]


def copies(
    rank: int,
    *widths: int,
    rows: int = 512,
    more: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Parts:
    """An MLP under DistributedDataParallel."""
    model, loss_fn = DistributedDataParallel(mlp(*widths)), nn.BCEWithLogitsLoss()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model(x) if more is None else more(model, x), y)

    return usual(model, loss, batches_of(rank, rows, widths[0]))


class Slept:
    """Batches, before each of which this rank sleeps."""

    def __init__(self, batches: list[Any], seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


class SlowBackward(torch.autograd.Function):
    """Sleeps in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        """Returns x."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Returns the gradient as it is."""
        time.sleep(ctx.seconds)
        return gradient, None


def straggling_input(rank: int) -> Parts:
    parts = copies(rank, 256, 512, 1)
    return (
        parts._replace(batches=Slept(parts.batches, SLEEP_S)) if rank == SLOW else parts
    )


def straggling_backward(rank: int) -> Parts:
    seconds = SLEEP_S if rank == SLOW else 0.0
    return copies(
        rank, 256, 512, 1, more=lambda model, x: SlowBackward.apply(model(x), seconds)
    )  # type: ignore[no-untyped-call]


def on_a_slow_host(rank: int) -> Parts:
    """Rank 1 takes longer for its forward, its backward and its optimizer alike."""
    seconds = SLEEP_S / 3 if rank == SLOW else 0.0

    def longer(model: nn.Module, x: Tensor) -> Tensor:
        time.sleep(seconds)
        return SlowBackward.apply(model(x), seconds)  # type: ignore[no-untyped-call, no-any-return]

    parts = copies(rank, 256, 512, 1, more=longer)
    parts.optimizer.register_step_pre_hook(lambda *_: time.sleep(seconds))
    return parts


def rotating(rank: int) -> Parts:
    """In each step another rank sleeps: which one, the batch's number says."""
    parts = copies(rank, 256, 512, 1)
    numbered = [(number, *batch) for number, batch in enumerate(parts.batches)]

    def step(number: int, *batch: Tensor) -> None:
        if number % dist.get_world_size() == rank:
            time.sleep(SLEEP_S)
        parts.step(*batch)

    return parts._replace(step=step, batches=numbered)


def unmerged(rank: int) -> Parts:
    """Gradients that are summed tensor by tensor."""
    model, loss_fn = mlp(*[32] * 25, 1), nn.BCEWithLogitsLoss()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)

    def exchange() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return usual(
        model, lambda x, y: loss_fn(model(x), y), batches_of(rank, 64, 32), exchange
    )


class Exchange(torch.autograd.Function):
    """Each rank gives every other one its share of the rows, and gets theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the rows of all ranks that are this one's: (B, D) of (B, D)."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the gradients of the rows that were given away."""
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous())
        return out


class TablesApart(nn.Module):
    """A table on each rank, which looks up the ids of all ranks; top layers on each rank.

    Args:
        ids: ids that a row has in this rank's table.
    """

    def __init__(self, ids: int, dim: int = 64) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50_000, dim, mode="sum", sparse=True)
        self.top = mlp(dim, 64, 1)
        self.ids = ids

    def forward(self, mine: Tensor, others: Tensor) -> Tensor:
        """Returns (B, 1) logits of (B, ids) ids of this rank's table, of this rank's rows and of all others'."""
        rows = self.table(torch.cat([mine, others]))
        return self.top(Exchange.apply(rows)[: len(mine)])  # type: ignore[no-untyped-call]


def imbalanced(rank: int) -> Parts:
    """Rank 1's table is read by lists of 200 ids, that of the others by 2."""
    ids, rows = 200 if rank == SLOW else 2, 1_024
    model, loss_fn = TablesApart(ids), nn.BCEWithLogitsLoss()
    dense = torch.optim.Adam(model.top.parameters())
    sparse = torch.optim.SGD(model.table.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    batches = [(torch.rand(rows, 1, generator=generator),) for _ in range(8)]

    def step(y: Tensor) -> None:
        mine, others = (
            torch.randint(50_000, (rows, ids), generator=generator) for _ in range(2)
        )
        dense.zero_grad()
        sparse.zero_grad()
        loss_fn(model(mine, others), y).backward()
        dense.step()
        sparse.step()

    return Parts(step, batches, model, dense)


class Bags(nn.Module):
    """A table that is read by lists, which every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.EmbeddingBag(5_000, 64, mode="sum"), mlp(64, 64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns (B, 1) logits of (B, L) ids."""
        return self.top(self.table(ids))


def uneven(rank: int) -> Parts:
    """A row of rank 1 has lists of 200 ids, that of the others of 10."""
    model, loss_fn = DistributedDataParallel(Bags()), nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(rank)
    ids, rows = 200 if rank == SLOW else 10, 1_024
    batches = [
        (
            torch.randint(5_000, (rows, ids), generator=generator),
            torch.rand(rows, 1, generator=generator).round(),
        )
        for _ in range(8)
    ]
    return usual(model, lambda x, y: loss_fn(model(x), y), batches)


def on_one_core(rank: int) -> Parts:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return copies(rank, 256, 512, 512, 1)


def healthy_towers(rank: int) -> Parts:
    """Two towers of some width on rows of tables that stay."""
    users, items = nn.Embedding(20_000, 64), nn.Embedding(5_000, 64)
    loss_fn = nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (
            torch.randint(20_000, (2048,), generator=generator),
            torch.randint(5_000, (2048,), generator=generator),
            torch.rand(2048, generator=generator).round(),
        )
        for _ in range(8)
    ]

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = mlp(64, 768, 768, 64), mlp(64, 768, 768, 64)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return (self.user(user) * self.item(item)).sum(1)

    scores = DistributedDataParallel(Scores())
    optimizer = torch.optim.Adam(scores.parameters())

    def step(user: Tensor, item: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            rows = users(user), items(item)
        loss_fn(scores(*rows), y).backward()
        optimizer.step()

    return Parts(step, batches, scores, optimizer)


def dlrm(
    rank: int, rows: int = 10_000, dim: int = 64, batch: int = 512
) -> tuple[nn.Module, Any]:
    """TorchRec's examples/golden_training: DLRM, and its random rows of Criteo's columns; with smaller tables."""
    from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
    from torchrec.datasets.random import RandomRecDataset
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[name],
        )
        for name in DEFAULT_CAT_NAMES
    ]
    model = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables),
        dense_in_features=len(DEFAULT_INT_NAMES),
        dense_arch_layer_sizes=[64, dim],
        over_arch_layer_sizes=[64, 1],
    )
    data = RandomRecDataset(
        DEFAULT_CAT_NAMES, batch, hash_size=rows, ids_per_feature=1, num_dense=len(DEFAULT_INT_NAMES),
        manual_seed=rank, num_generated_batches=10, num_batches=10,
    )  # fmt: skip
    return DLRMTrain(model), data


def golden(rank: int) -> Parts:
    """The golden training's step under DistributedModelParallel, its tables moved inside the backward."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from torchrec_ext.distributed.optim.declared import apply_optimizer_in_backward

    torch.manual_seed(0)
    model, data = dlrm(rank)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.1}
    )  # type: ignore[union-attr]
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    )
    optimizer = CombinedOptimizer([parallel.fused_optimizer, dense])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        parallel(batch)[0].backward()
        optimizer.step()

    return Parts(step, list(data), parallel, optimizer)


LONG_WAY = {"LAG_RANKS": "0,1", "LAG_US": "6000", "LAG_US_PER_BYTE": "0"}
# 20 MB/s from each rank
NARROW_WAY = {"LAG_RANKS": "0,1", "LAG_US": "0", "LAG_US_PER_BYTE": "0.05"}
SLOW_LINK = {"LAG_RANKS": "1", "LAG_US": "0", "LAG_US_PER_BYTE": "0.05"}  # 20 MB/s

PLANTED: dict[str, Case] = {
    "a delayed collective": Case(
        lambda rank: copies(rank, 256, 512, 1), "latency", lag=LONG_WAY
    ),
    "a slow link on one rank": Case(
        lambda rank: copies(rank, 256, 512, 1), "slow_link", SLOW, SLOW_LINK
    ),
    "an unmerged exchange": Case(unmerged, "unmerged_exchange"),
    "an imbalanced table": Case(imbalanced, "imbalanced_table", SLOW),
    "a straggler in input": Case(straggling_input, "straggler_input", SLOW),
    "a straggler in backward only": Case(
        straggling_backward, "straggler_backward", SLOW
    ),
    "a slow host": Case(on_a_slow_host, "slow_rank", SLOW),
    "lists of uneven length": Case(uneven, "uneven_lists", SLOW),
    "many bytes on narrow links": Case(
        lambda rank: copies(rank, 256, 512, 512, 1), "bandwidth", lag=NARROW_WAY
    ),
    "a rotating straggler": Case(rotating, "rotating_straggler"),
    "processes that share a core": Case(on_one_core, "oversubscribed"),
}
HEALTHY: dict[str, Case] = {
    "2 ranks: an MLP": Case(lambda rank: copies(rank, 256, 1024, 1024, 1, rows=2048)),
    "2 ranks: two towers": Case(healthy_towers),
}


FOREIGN: dict[str, Case] = {"TorchRec's golden DLRM on 2 ranks": Case(golden)}
CASES = {**PLANTED, **HEALTHY, **FOREIGN}


def lagging(case: Case, folder: str) -> dict[str, str]:
    """Returns the environment in which a program's messages lag; builds the library for it."""
    if not case.lag:
        return {}
    source, library = Path(folder, "lag.c"), Path(folder, "lag.so")
    source.write_text(LAG)
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"],
        check=True,
    )
    return {"LD_PRELOAD": str(library), **case.lag}


def launched(
    name: str, seed: int, run: Callable[..., Any], budget_s: float = 25.0
) -> Any:
    """Diagnoses a program on two ranks with ``run``, which takes a command and an environment."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        return run(
            [*command, __file__, name, str(seed), str(budget_s)],
            **lagging(case, folder),
        )


def main(name: str, seed: int, budget_s: float) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    case, rank = CASES[name], dist.get_rank()
    parts = case.make(rank)
    start = time.perf_counter()
    diagnosis = why_slow.step(
        parts.step,
        parts.batches,
        model=parts.model,
        optimizer=parts.optimizer,
        budget_s=budget_s,
    )
    seconds = time.perf_counter() - start
    if rank == 0:
        first = diagnosis.findings[0].ranks if diagnosis.findings else ()
        above = [
            finding.cause
            for finding in diagnosis.findings
            if finding.size in ("large", "medium")
        ]
        print(diagnosis)
        made = {
            "verdict": diagnosis.verdict,
            "ranks": first,
            "above": above,
            "noisy": diagnosis.noisy,
        }
        print(json.dumps({**made, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(sys.argv[1], int(given.get(2, 0)), float(given.get(3, 25)))
