"""The 100 greatest products of one query with stored rows, one thread.

exact-search compares ExactIndex over a store, as a server opens it, with FAISS's own exact search (IndexFlatIP): by all
rows, and by the copy in 8 bits that a server keeps. That copy is also compared with FAISS's, whose best are computed
again (IndexRefineFlat over IndexScalarQuantizer), as many of them as give the same results. filtered compares a search
under a filter, from the request's value to the results, with the same search without one. approximate compares an index
at recall .95 with exact search.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import torch
from harness import Options, Row, calls_in_turn, number_of_calls
from serving import compared

from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.retrieval.bundle.tables import Attribute
from torchrec_ext.retrieval.index.exact import ExactIndex, ScoredIndex
from torchrec_ext.retrieval.index.faiss import FaissIndex
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.writer import write_store

K = 100
TRIED = 20  # queries by which results are compared


def exact(options: Options) -> Iterator[Row]:
    """Times the top 100 of 1,000,000 x 64, one query at a time."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows = torch.randn(20_000 if options.quick else 1_000_000, 64)
    flat = faiss.IndexFlatIP(64)
    flat.add(rows.numpy())
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(folder, [(np.arange(len(rows)), rows)])
        yield from _exact(options, rows, store, flat)


def _exact(
    options: Options, rows: torch.Tensor, store: EmbeddingStore, flat: Any
) -> Iterator[Row]:
    ours, quantized = ExactIndex(store, "dot"), ExactIndex(store, "dot")
    quantized.quantize()
    calls = 20
    queries = torch.randn(number_of_calls(options.turns, calls), 64)
    refined = _refined(rows, queries[:TRIED], ours)
    for query in queries[:TRIED].split(1):  # positions but for rounding
        assert torch.allclose(
            ours.search(query, K)[0], quantized.search(query, K)[0], rtol=1e-5
        )
    times = calls_in_turn(
        {
            "flat": _of_faiss(flat, queries),
            "refined": _of_faiss(refined, queries),
            "ours": lambda number: ours.search(queries[number : number + 1], K),
            "quantized": lambda number: quantized.search(
                queries[number : number + 1], K
            ),
        },
        options.turns,
        calls,
    )
    # Within 1.2 times FAISS flat: a ratio of 1 / 1.2 or more.
    name = f"exact-search, top {K} of {len(rows):,} x 64"
    yield compared(name, times["flat"], times["ours"], 0.83, machine="memory")
    copied = (
        f"{name}, by a copy in 8 bits"
        if quantized.quantized
        else f"{name}, no copy in 8 bits on this processor"
    )
    yield compared(copied, times["flat"], times["quantized"], 0.83, machine="memory")
    yield compared(
        f"{copied}, against FAISS's refined",
        times["refined"],
        times["quantized"],
        None,
        machine="memory",
        k_factor=refined.k_factor,
    )


def _of_faiss(index: Any, queries: torch.Tensor) -> Callable[[int], object]:
    return lambda number: index.search(queries[number : number + 1].numpy(), K)


def _refined(rows: torch.Tensor, queries: torch.Tensor, exactly: ExactIndex) -> Any:
    """Returns FAISS's 8-bit index with the least refinement, by powers of two, that gives the exact results."""
    truth = exactly.search(queries, K)[1].numpy()
    coded = faiss.IndexScalarQuantizer(
        64, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    refined = faiss.IndexRefineFlat(coded)
    refined.train(rows[:100_000].numpy())
    refined.add(rows.numpy())
    refined.k_factor = 1
    while refined.k_factor < 64:
        result = refined.search(queries.numpy(), K)[1]
        if all(
            np.array_equal(np.sort(left), np.sort(right))
            for left, right in zip(truth, result, strict=True)
        ):
            break
        refined.k_factor *= 2
    return refined


SHARES = (0.0001, 0.01, 0.1, 0.5, 1.0)  # of the items that a filter leaves


def filtered(options: Options) -> Iterator[Row]:
    """Times the top 100 under filters of five shares: 1,000,000 x 64 by products, and 100,000 x 16 by a top NN."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    count = 20_000 if options.quick else 1_000_000
    products = ExactIndex(torch.randn(count, 64), "dot")
    products.quantize()
    yield from _filtered(
        options,
        products,
        64,
        "by a copy in 8 bits" if products.quantized else "by products",
        20,
    )
    network = projection(TopMLP([16, 16], (16,)), 16)
    few = count // 10
    yield from _filtered(
        options, ScoredIndex(network, torch.randn(few, 16)), 16, "by a top NN", 5
    )


def _filtered(
    options: Options, index: ExactIndex | ScoredIndex, width: int, how: str, calls: int
) -> Iterator[Row]:
    queries = torch.randn(number_of_calls(options.turns, calls), width)
    draws = np.random.default_rng(0).random((len(SHARES), index.size))
    items: list[list[str]] = [[] for _ in range(index.size)]
    for share, drawn in zip(SHARES, draws, strict=True):
        for item in np.flatnonzero(drawn < share).tolist():
            items[item].append(f"{share:g}")
    attribute = Attribute(pa.chunked_array([pa.array(items)]))

    def search(number: int, share: float | None) -> object:
        allowed = None
        if share is not None:
            bits = np.unpackbits(
                attribute.bits([f"{share:g}"]), count=index.size, bitorder="little"
            )
            allowed = torch.from_numpy(bits.view(np.bool_))
        return index.search(queries[number : number + 1], K, allowed=allowed)

    sides: dict[str, Callable[[int], object]] = {
        "none": lambda number: search(number, None)
    }
    for share in SHARES:
        sides[f"{share:g}"] = lambda number, share=share: search(number, share)
    times = calls_in_turn(sides, options.turns, calls)
    for share in SHARES:
        name = f"filtered-search, {100 * share:g} % of {index.size:,} x {width}, {how}, against no filter"
        # At most 1.1 times the search without a filter: a ratio of 1 / 1.1 or more.
        yield compared(
            name, times["none"], times[f"{share:g}"], 0.909, machine="memory"
        )


def approximate(options: Options) -> Iterator[Row]:
    """Times the top 100 of 200,000 x 64 around 2,000 centres, query by query, at the setting with recall .95."""
    generator = torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    count, calls = (20_000, 20) if options.quick else (200_000, 40)
    centres = torch.randn(2_000, 64, generator=generator)

    def drawn(some: int) -> torch.Tensor:
        return centres[
            torch.randint(2_000, (some,), generator=generator)
        ] + 0.5 * torch.randn(some, 64, generator=generator)

    rows, queries = drawn(count), drawn(number_of_calls(options.turns, calls))
    slow = ExactIndex(rows, "dot")
    slow.quantize()  # as it is served
    for kind in ("ivf", "hnsw"):
        fast = FaissIndex.build(
            rows, "dot", kind=kind, recall=0.95, k=K, queries=drawn(256)
        )
        times = calls_in_turn(
            {
                "exact": lambda number: slow.search(queries[number : number + 1], K),
                "ours": lambda number, fast=fast: fast.search(
                    queries[number : number + 1], K
                ),
            },
            options.turns,
            calls,
        )
        name = f"approximate, {kind}, top {K} of {count:,} x 64 in clusters"
        recall = round(fast.measured_recall, 4)
        yield compared(
            name,
            times["exact"],
            times["ours"],
            5.0,
            recall=recall,
            setting=fast.setting,
        )
