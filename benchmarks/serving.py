"""Serving: scores, searches, embedding and the HTTP service; each row times both of its sides in turn, on one thread.

    python benchmarks/serving.py [--only ROW ...] [--turns 3] [--quick]

Rows come from the modules serving_*.py beside this file; each says what its sides are. Last line: one JSON object.
"""

import importlib
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's, before it is imported

from harness import Options, Row, command_line, percentile, row

# By the name that --only takes, module and function, which yields one row or more; a
# module is imported when its row is asked for.
ROWS = {
    "scores": "serving_scores:scores",
    "exact-search": "serving_search:exact",
    "filtered-search": "serving_search:filtered",
    "approximate": "serving_search:approximate",
    "embed": "serving_embed:rows",
    "http": "serving_http:http",
    "loadgen": "serving_loadgen:loadgen",
    "movielens": "serving_movielens:films",
    "movielens-large": "serving_movielens:recombined",
    "attacks": "serving_attacks:attacks",
}
# Minutes each, and the data sets of TORCHREC_EXT_DATA or mlcommons-loadgen.
STUDIES = ("movielens", "movielens-large", "attacks", "loadgen")


def main() -> None:
    rows = {name: _rows(*path.split(":")) for name, path in ROWS.items()}
    command_line(
        __doc__,
        rows,
        turns=3,
        packages="numpy faiss-cpu onnxruntime starlette uvicorn",
        studies=STUDIES,
    )


def _rows(module: str, function: str) -> Callable[[Options], Iterator[Row]]:
    def rows(options: Options) -> Iterator[Row]:
        yield from getattr(importlib.import_module(module), function)(options)

    return rows


def compared(
    name: str,
    baseline: Sequence[Sequence[float]],
    ours: Sequence[Sequence[float]],
    required: float | None,
    *,
    ceiling: float | None = None,
    machine: str | None = None,
    **more: object,
) -> Row:
    """Returns the row of two sides' seconds by turn and call: medians of the turns in ms, and p99 of all calls."""
    sides = {"": ours, "baseline_": baseline}
    p99 = {f"{side}p99": p99_ms(turns) for side, turns in sides.items()}
    medians = [
        [1e3 * statistics.median(turn) for turn in turns] for turns in (ours, baseline)
    ]
    return row(
        name,
        medians[0],
        "ms",
        baseline=medians[1],
        required=required,
        ceiling=ceiling,
        machine=machine,
        **p99,
        **more,
    )


def p99_ms(turns: Sequence[Sequence[float]]) -> float:
    """Returns the 99th percentile of all calls, in ms."""
    return round(1e3 * percentile(list(itertools.chain(*turns)), 99), 4)


if __name__ == "__main__":
    main()
