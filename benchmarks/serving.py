"""Serving: each row measures both of its sides in one run, in turn, on one thread.

    python benchmarks/serving.py [--only ROW ...] [--repeats 7] [--quick]

Rows come from the modules serving_*.py beside this file; each says what its sides are. `--quick` makes every row small,
to see that it runs; its figures mean nothing. Last line: one JSON object.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, before it is imported

from serving_rows import Options, Row

# By the name that --only takes, module and function, which yields one row or more; a module is imported when its row is
# asked for.
ROWS = {
    "scores": "serving_scores:scores",
    "exact-search": "serving_search:exact",
    "approximate": "serving_search:approximate",
    "movielens": "serving_movielens:films",
    "movielens-large": "serving_movielens:recombined",
    "embed": "serving_embed:rows",
    "http": "serving_http:http",
    "attacks": "serving_attacks:attacks",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=7, help="rounds over all sides of a row, times 4 or 40")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    asked = Options(repeats=options.repeats, quick=options.quick)
    rows = [row for name in options.only for row in function(ROWS[name])(asked)]
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "torchrec", "numpy", "faiss-cpu", "onnxruntime")
    }
    print(
        json.dumps({"benchmark": "serving", "versions": versions, "cores": len(os.sched_getaffinity(0)), "rows": rows})
    )


def function(place: str) -> Callable[[Options], Iterator[Row]]:
    """The function that a row names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
