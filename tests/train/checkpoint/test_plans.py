"""A checkpoint of any plan on any number of ranks loads into any other: bit for bit, optimizer rows included."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contracts import run_ranks
from tests.examples import META, batches, small_model
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.state import ModelState, Parts, model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError

SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "data_parallel",
)
OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam", "lazy_adam")
Case = tuple[str, str]


def made(runtime: Runtime, model: Any, sharding: str, kind: str) -> Any:
    optimizer = OptimizerConfig(tables=kind, tables_lr=0.05)  # type: ignore[arg-type]
    config = PlanConfig(sharding=sharding)  # type: ignore[arg-type]
    return hybrid_parallel(
        model, runtime, plan=config, optimizer=optimizer, seed=runtime.world_size
    )


def losses(
    runtime: Runtime, model: Any, optimizer: Any, count: int, seed: int
) -> list[float]:
    """Of ``count`` steps, each the mean over ranks."""
    found = []
    for batch in batches(
        count, rank=runtime.rank, world_size=runtime.world_size, seed=seed
    ):
        optimizer.zero_grad()
        loss = model(batch)[0]
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / runtime.world_size)
    return found


def whole(state: ModelState) -> dict[str, Tensor]:
    """Every tensor as a whole, on every rank."""
    mine = {
        name: (
            tuple(held.size()),
            [(part.offsets, part.tensor.clone().cpu()) for part in held.parts],
        )
        if isinstance(held, Parts)
        else ((), [((), held.clone().cpu())])
        for name, held in state.everything().items()
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (size, parts) in rank.items():
            for offsets, tensor in parts:
                if not offsets:
                    found[name] = tensor
                    continue
                into = found.setdefault(name, torch.full(size, float("nan")))
                into[
                    tuple(
                        slice(at, at + length)
                        for at, length in zip(offsets, tensor.shape, strict=True)
                    )
                ] = tensor
    return found


def row_widths(state: ModelState) -> dict[str, tuple[int, ...]]:
    """Of the parts of each row state that some rank holds."""
    widths = {
        name: own.widths
        for name, own in state.tensors.items()
        if isinstance(own, Parts) and own.widths
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, widths)
    return {name: widths for rank in ranks for name, widths in rank.items()}


def save_all(runtime: Runtime, cases: list[Case], folder: str) -> Any:
    """Trains, saves and goes on, under each case; what was saved, and the losses after it."""
    found = {}
    for sharding, kind in cases:
        model, optimizer = made(runtime, small_model(META), sharding, kind)
        losses(runtime, model, optimizer, 5, seed=1)
        checkpointer = Checkpointer(
            f"{folder}/{runtime.world_size}-{sharding}-{kind}", runtime
        )
        state = model_state(model, optimizer)
        checkpointer.save(5, state, content={"kind": kind})
        saved, widths = whole(state), row_widths(state)
        # while it is being written
        after = losses(runtime, model, optimizer, 10, seed=2)
        checkpointer.close()
        found[sharding, kind] = saved, widths, after
    return found


def load_all(
    runtime: Runtime, cases: list[Case], sources: list[str], folder: str
) -> Any:
    """Every source of the same optimizer into every case; what was loaded, and the losses after it."""
    found = {}
    for sharding, kind in cases:
        for source in sources:
            if not source.endswith(f"-{kind}"):
                continue
            model, optimizer = made(runtime, small_model(META), sharding, kind)
            checkpointer = Checkpointer(f"{folder}/{source}", runtime)
            path = checkpointer.last_good()
            assert path is not None
            state = model_state(model, optimizer)
            assert checkpointer.load(path, state)["content"] == {"kind": kind}
            loaded, widths = whole(state), row_widths(state)
            found[sharding, kind, source] = (
                loaded,
                widths,
                losses(runtime, model, optimizer, 10, seed=2),
            )
            checkpointer.close()
    return found


def pairs(
    folder: Path,
    worlds: tuple[int, ...],
    shardings: tuple[str, ...],
    kinds: tuple[str, ...],
) -> Iterator[Any]:
    """(source, target, saved, loaded) of all pairs of ranks and plans."""
    cases = [(sharding, kind) for kind in kinds for sharding in shardings]
    saved = {
        f"{world}-{sharding}-{kind}": outcome
        for world in worlds
        for (sharding, kind), outcome in run_ranks(
            save_all, world, cases, str(folder), timeout_s=600
        )[0].items()
    }
    for world in worlds:
        loaded = run_ranks(
            load_all, world, cases, list(saved), str(folder), timeout_s=1800
        )[0]
        for (sharding, kind, source), outcome in loaded.items():
            yield source, f"{world}-{sharding}-{kind}", saved[source], outcome


def assert_loaded(source: str, target: str, saved: Any, loaded: Any) -> None:
    before, widths, next_losses = saved
    after, other_widths, found_losses = loaded
    assert after.keys() == before.keys(), (source, target)
    split = [name for name, own in widths.items() if own != other_widths[name]]
    for name in before:
        expected = before[name]
        if name in split:
            # The stated rule: each part begins with the mean over all columns.
            shares = torch.tensor(widths[name], dtype=torch.float64)
            mean = expected.double() @ (shares / shares.sum())
            expected = mean.float().unsqueeze(1).expand_as(after[name])
        assert torch.equal(after[name], expected), (source, target, name)
    if source == target:
        assert found_losses == next_losses, (source, target)
    elif not split:
        assert found_losses == pytest.approx(next_losses, abs=1e-5), (source, target)


def test_any_plan_loads_into_any_other(tmp_path: Path) -> None:
    count = 0
    for pair in pairs(
        tmp_path, (1, 2), ("column_wise", "data_parallel"), ("row_wise_adagrad",)
    ):
        assert_loaded(*pair)
        count += 1
    assert count == 4 * 4


def other_optimizer(runtime: Runtime, folder: str) -> list[str]:
    said = []
    kinds = ("adagrad", "row_wise_adagrad")
    for kind in kinds:
        model, optimizer = made(runtime, small_model(META), "table_wise", kind)
        checkpointer = Checkpointer(f"{folder}/{kind}", runtime)
        checkpointer.save(1, model_state(model, optimizer))
        checkpointer.close()
    for kind, other in zip(kinds, kinds[::-1], strict=True):
        model, optimizer = made(runtime, small_model(META), "table_wise", other)
        checkpointer = Checkpointer(f"{folder}/{kind}", runtime)
        path = checkpointer.last_good()
        assert path is not None
        with pytest.raises(CheckpointError) as error:
            checkpointer.load(path, model_state(model, optimizer))
        said.append(str(error.value))
    return said


def test_a_state_of_each_weight_is_not_one_of_each_row(tmp_path: Path) -> None:
    ((whole_state, row_state),) = run_ranks(other_optimizer, 1, str(tmp_path))
    assert "has one number a row, saved as (" in whole_state
    assert "is of another model" in row_state


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_pairs_of_plans_and_ranks(kind: str, tmp_path: Path) -> None:
    # Four ranks take four fifths of the time: with a state for each row, and with one
    # for each weight and a step.
    worlds = (1, 2, 4) if kind in ("row_wise_adagrad", "lazy_adam") else (1, 2)
    # Of these FBGEMM has no kernel for a CPU, so they are replicated.
    shardings = ("data_parallel",) if "adam" in kind else SHARDINGS
    count = 0
    for pair in pairs(tmp_path, worlds, shardings, (kind,)):
        assert_loaded(*pair)
        count += 1
    assert count == (len(worlds) * len(shardings)) ** 2


KERNELS = {
    "fused": PlanConfig(sharding="row_wise", kernel="fused"),
    "dense": PlanConfig(sharding="data_parallel"),
    "fused_uvm": PlanConfig(sharding="table_wise", kernel="fused_uvm"),
    "fused_uvm_caching": PlanConfig(
        sharding="row_wise", kernel="fused_uvm_caching", cache_load_factor=0.1
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", list(KERNELS)[1:])
def test_kernels_of_a_gpu_load_each_other(kernel: str, tmp_path: Path) -> None:
    config = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.05)
    for source, target in (("fused", kernel), (kernel, "fused")):
        with Runtime.start("cuda") as runtime:
            states = []
            for plan in (KERNELS[source], KERNELS[target]):
                model, optimizer = hybrid_parallel(
                    small_model(META), runtime, plan=plan, optimizer=config
                )
                for batch in batches(3, seed=len(states)):
                    optimizer.zero_grad()
                    model(batch.to(runtime.device))[0].backward()
                    optimizer.step()
                states.append(model_state(model, optimizer))
            checkpointer = Checkpointer(str(tmp_path / source), runtime)
            checkpointer.save(3, states[0])
            checkpointer.wait()
            checkpointer.load(checkpointer.folder.path(3), states[1])
            checkpointer.close()
            saved, loaded = map(whole, states)
        assert saved.keys() == loaded.keys()
        assert "tables.user_id.sum" in saved
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), (source, target, name)
