"""Top 100: exact search against FAISS flat, and an approximate index at recall 0.95 against exact."""

from collections.abc import Iterator

import faiss
import torch
from serving_rows import Options, Row, compared, in_turn

from torchrec_ext.retrieval.index.exact import ExactIndex
from torchrec_ext.retrieval.index.faiss import FaissIndex

K = 100


def exact(options: Options) -> Iterator[Row]:
    """Top 100 of 1,000,000 x 64, one query at a time, one thread; as it is served, by a copy in 8 bits too."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows = torch.randn(20_000 if options.quick else 1_000_000, 64)
    flat = faiss.IndexFlatIP(64)
    flat.add(rows.numpy())
    ours, quantized = ExactIndex(rows, "dot"), ExactIndex(rows, "dot")
    quantized.quantize()
    queries = torch.randn(4 * options.repeats + 3, 64)
    times = in_turn(
        4 * options.repeats,
        {
            "faiss": lambda number: flat.search(queries[number : number + 1].numpy(), K),
            "ours": lambda number: ours.search(queries[number : number + 1], K),
            "quantized": lambda number: quantized.search(queries[number : number + 1], K),
        },
    )
    for query in queries.split(1):
        assert torch.allclose(
            ours.search(query, K)[0], quantized.search(query, K)[0], rtol=1e-5
        )  # positions but for rounding
    # Within 1.2 times FAISS flat: a ratio of 1 / 1.2 or more.
    name = f"exact-search, top {K} of {len(rows):,} x 64"
    yield compared(name, times["faiss"], times["ours"], 0.83)
    yield compared(
        f"{name}, by a copy in 8 bits" if quantized.quantized else f"{name}, again",
        times["faiss"],
        times["quantized"],
        0.83,
    )


def approximate(options: Options) -> Iterator[Row]:
    """Times the top 100 of 200,000 x 64 around 2,000 centres, query by query, at the setting with recall 0.95."""
    generator = torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    count = 20_000 if options.quick else 200_000
    centres = torch.randn(2_000, 64, generator=generator)

    def drawn(some: int) -> torch.Tensor:
        return centres[torch.randint(2_000, (some,), generator=generator)] + 0.5 * torch.randn(
            some, 64, generator=generator
        )

    rows, queries = drawn(count), drawn(4 * options.repeats + 3)
    slow = ExactIndex(rows, "dot")
    for kind in ("ivf", "hnsw"):
        fast = FaissIndex.build(rows, "dot", kind=kind, recall=0.95, k=K, queries=drawn(256))
        times = in_turn(
            4 * options.repeats,
            {
                "exact": lambda number: slow.search(queries[number : number + 1], K),
                "ours": lambda number, fast=fast: fast.search(queries[number : number + 1], K),
            },
        )
        found = compared(
            f"approximate, {kind}, top {K} of {count:,} x 64 in clusters", times["exact"], times["ours"], 5.0
        )
        yield found | {"recall": round(fast.measured_recall, 4), "setting": fast.setting}
