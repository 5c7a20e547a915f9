"""A collective over shared memory gives what gloo gives, bit for bit on two ranks, in every order of waits."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contracts import run_ranks
from tests.distributed.shared_memory.conftest import needs_library
from torchrec_ext.distributed import share_memory
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.shared_memory.sharing import shares_memory

Call = Callable[[dist.ProcessGroup], list[Tensor]]
SUM = dist.ReduceOp.SUM
ADDED = (
    *(torch.float32, torch.bfloat16, torch.int64, torch.float64),
    *(torch.float16, torch.int32, torch.uint8, torch.int8),
)
MOVED = (*ADDED, torch.bool, torch.int16, torch.complex64)
SHAPES = ((0,), (1,), (7,), (33, 5), (4096,), (300_001,), (3_000_000,))

pytestmark = needs_library


def numbers(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    values = torch.randn(shape, generator=generator) * 3
    return (
        values.to(dtype)
        if dtype.is_floating_point or dtype.is_complex
        else (values.abs() * 10).to(dtype)
    )


def in_place(tensor: Callable[[], Tensor], collective: Any, *more: Any) -> Call:
    """A call that writes its result into the tensor that it sends."""

    def call(group: dist.ProcessGroup) -> list[Tensor]:
        own = tensor()
        collective(own, *more, group=group)
        return [own]

    return call


def into(
    output: Callable[[], Any], collective: Any, sent: Callable[[], Any], *more: Any
) -> Call:
    """A call that writes its result into other memory, one tensor or several."""

    def call(group: dist.ProcessGroup) -> list[Tensor]:
        found = output()
        collective(found, sent(), *more, group=group)
        return found if isinstance(found, list) else [found]

    return call


def of_shape(
    rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Call]:
    """Every collective on tensors of a shape; rank a sends rank b (3a + 5b) % 7 sevenths where splits are uneven."""
    count, *rest = shape
    unit = max(1, count // 7) if count else 0
    ranks = range(size)

    def fresh(rows: int) -> Tensor:
        return numbers(torch.Generator().manual_seed(rank), (rows, *rest), dtype)

    def empty(rows: int) -> Tensor:
        return torch.empty((rows, *rest), dtype=dtype)

    def rows(a: int, b: int) -> int:
        return (3 * a + 5 * b) % 7 * unit

    given = [rows(rank, peer) for peer in ranks]
    taken = [rows(peer, rank) for peer in ranks]
    own, all_own = partial(fresh, count), partial(fresh, size * count)
    one, of_all = partial(empty, count), partial(empty, size * count)
    exchange = dist.all_to_all_single
    cases = {
        "broadcast": in_place(own, dist.broadcast, size - 1),
        "all_gather": into(lambda: [one() for _ in ranks], dist.all_gather, own),
        "all_gather_into_tensor": into(of_all, dist.all_gather_into_tensor, own),
        "reduce_scatter_tensor": into(one, dist.reduce_scatter_tensor, all_own),
        "reduce_scatter": into(
            one, dist.reduce_scatter, lambda: list(all_own().tensor_split(size))
        ),
        "all_to_all_single uneven": into(
            partial(empty, sum(taken)),
            exchange,
            partial(fresh, sum(given)),
            taken,
            given,
        ),
        "all_to_all_single even": into(of_all, exchange, all_own),
    }
    for op in ("SUM", "MIN", "MAX", "PRODUCT"):
        if op == "SUM" or count < 300_000:
            kind = getattr(dist.ReduceOp, op)
            cases[f"all_reduce {op}"] = in_place(own, dist.all_reduce, kind)
    return cases


def of_other_kinds(rank: int, size: int) -> dict[str, Call]:
    """Layouts, means, and what gloo keeps."""

    def transposed(group: dist.ProcessGroup) -> list[Tensor]:
        draw = torch.Generator().manual_seed(rank)
        tensor = numbers(draw, (40, 30), torch.float32).t()
        outputs = [torch.empty(40, 30).t() for _ in range(size)]
        dist.all_gather(outputs, tensor, group=group)
        dist.all_reduce(tensor, group=group)
        return [tensor, *outputs]

    def rooted(group: dist.ProcessGroup) -> list[Tensor]:
        tensor = torch.full((5,), float(rank))
        outputs = given = None
        if rank == 0:
            outputs = [torch.empty(5) for _ in range(size)]
            given = [torch.full((5,), float(peer)) for peer in range(size)]
        dist.gather(tensor, outputs, dst=0, group=group)
        dist.scatter(tensor, given, group=group)
        dist.reduce(tensor, 0, group=group)
        return [*(outputs or []), *([tensor] if rank == 0 else [])]

    ops = dist.ReduceOp
    return {
        "transposed": transposed,
        "all_reduce AVG": in_place(
            lambda: torch.full((5,), rank + 1.0), dist.all_reduce, ops.AVG
        ),
        "all_reduce BOR": in_place(
            lambda: torch.tensor([rank + 1]), dist.all_reduce, ops.BOR
        ),
        "gather, scatter, reduce": rooted,
    }


def difference(one: list[Tensor], other: list[Tensor], *, exact: bool) -> str:
    pairs = list(zip(one, other, strict=True))
    if all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in pairs
    ):
        return "equal"
    half = one[0].dtype in (torch.float16, torch.bfloat16)
    close = all(
        torch.allclose(a, b, rtol=2e-2 if half else 1e-5, atol=0.1 if half else 1e-5)
        for a, b in pairs
    )
    return "rounded otherwise" if close and not exact else "differs"


def compared(
    runtime: Runtime, dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]
) -> Counter[str]:
    """How many calls give the same on a group of gloo and on one that shares memory; the names of those that differ."""
    gloo = dist.group.WORLD
    shared = dist.new_group()
    assert share_memory(shared)
    assert shares_memory(shared)
    assert not shares_memory(gloo)  # type: ignore[arg-type]
    rank, size = runtime.rank, runtime.world_size
    cases = list(of_other_kinds(rank, size).items())
    for dtype, shape in itertools.product(dtypes, shapes):
        if shape[0] < 300_000 or dtype in (torch.float32, torch.bfloat16, torch.int64):
            cases += [
                (f"{name} {dtype} {shape}", call)
                for name, call in of_shape(rank, size, shape, dtype).items()
            ]
    found: Counter[str] = Counter()
    for name, call in cases:
        results: list[Any] = []
        for group in (gloo, shared):
            try:
                results.append(call(group))  # type: ignore[arg-type]
            except (RuntimeError, ValueError) as error:
                results.append(str(error))
        refused = [isinstance(result, str) for result in results]
        if any(refused):
            found[
                "both refuse"
                if all(refused)
                else f"only one refuses: {name}: {results}"[:300]
            ] += 1
        else:
            outcome = difference(results[0], results[1], exact=size == 2)
            found[outcome if outcome != "differs" else f"differs: {name}"] += 1
    return found


def in_any_order(runtime: Runtime, count: int) -> list[str]:
    """More in flight than a ring holds; waits in any order; two groups; threads."""
    rank, size = runtime.rank, runtime.world_size
    assert share_memory()
    sizes = [random.Random(i).choice([1, 1000, 100_000, 700_000]) for i in range(count)]
    tensors = [torch.full((length,), float(rank + i)) for i, length in enumerate(sizes)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    order = list(range(count))
    random.Random(rank).shuffle(order)
    for i in order:
        works[i].wait()
    for i, tensor in enumerate(tensors):
        assert (tensor == sum(peer + i for peer in range(size))).all()
    done = [f"{count} in flight"]

    # Who does not wait must not keep others from going on, though it does not fit into
    # a ring.
    large = torch.ones(8_000_000)
    work = dist.all_reduce(large, async_op=True)
    time.sleep(0.05 * rank)
    dist.barrier()
    work.wait()
    assert (large == size).all()
    done.append("a barrier behind 32 MB")

    groups = [dist.new_group() for _ in range(2)]
    assert all(map(share_memory, groups))
    pair = [torch.ones(6_000_000), torch.ones(6_000_000)]
    crossed = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(pair, groups, strict=True)
    ]
    for work in crossed if rank % 2 else crossed[::-1]:
        work.wait()
    assert all((tensor == size).all() for tensor in pair)
    done.append("two groups in opposite order")

    if size > 2:
        ends = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            assert share_memory(ends)
            tensor = torch.full((5,), float(rank))
            dist.all_reduce(tensor, group=ends)
            assert (tensor == size - 1).all()
        done.append("a sub-group")
    assert not share_memory(dist.new_subgroups(1)[0])  # type: ignore[no-untyped-call]
    return done


def laws(
    runtime: Runtime,
    dtypes: list[torch.dtype],
    shapes: list[tuple[int, ...]],
    count: int,
) -> tuple[Any, ...]:
    return (
        compared(runtime, dtypes, shapes),
        in_any_order(runtime, count),
    )


def test_two_ranks_get_the_bits_of_gloo() -> None:
    for found, _ in run_ranks(
        laws, 2, [torch.float32, torch.bfloat16, torch.int64], SHAPES[:6:2], 20
    ):
        assert set(found) <= {"equal", "both refuse"}, found
        assert found["equal"] > 90


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_type_and_size(world_size: int) -> None:
    for found, _ in run_ranks(
        laws, world_size, list(MOVED), list(SHAPES), 120, timeout_s=300
    ):
        allowed = {"equal", "both refuse"} | (
            {"rounded otherwise"} if world_size > 2 else set()
        )
        refused_by_gloo = [
            key
            for key in found
            if key.startswith("only one refuses") and "'shared memory" not in key
        ]
        assert set(found) - set(refused_by_gloo) <= allowed, found
        assert found["equal"] > 400
