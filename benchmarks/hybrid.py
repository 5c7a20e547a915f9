"""Hybrid parallelism: each row measures both of its sides in one run, in turn, on real processes.

    python benchmarks/hybrid.py [--only ROW ...] [--repeats 7] [--quick]

Rows come from the modules hybrid_*.py beside this file; each says what its sides are. Beside a figure of two processes
stands the ceiling: how many times faster than one process two are that never talk, on this machine at that moment.
`--quick` makes every row small, to see that it runs; its figures mean nothing. Last line: one JSON object.
"""

import argparse
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator

import hybrid_chooser
import hybrid_merged
import hybrid_sync
import hybrid_towers
import hybrid_two_hosts
from hybrid_ranks import Options, Row

# By the name that --only takes; a function yields one row or more.
ROWS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "tower-parallel": hybrid_towers.rows,
    "two-hosts": hybrid_two_hosts.two_hosts,
    "merged": hybrid_merged.rows,
    "chooser": hybrid_chooser.chooser,
    "plan": hybrid_chooser.plan,
    "sync": hybrid_sync.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=7, help="rounds over all sides of a row, whose median counts")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    asked = Options(repeats=options.repeats, quick=options.quick)
    rows = [row for name in options.only for row in ROWS[name](asked)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrec")}
    print(
        json.dumps({"benchmark": "hybrid", "versions": versions, "cores": len(os.sched_getaffinity(0)), "rows": rows})
    )


if __name__ == "__main__":
    main()
