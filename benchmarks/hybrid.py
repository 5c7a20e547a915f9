"""Hybrid parallelism: each row measures both of its sides in one run, in turn, on real processes.

    python benchmarks/hybrid.py [--only ROW ...] [--turns 3] [--quick]

Rows come from the modules hybrid_*.py beside this file; each says what its sides are. Our sides are steps of `train()`,
which every command runs, with its checks and its pipeline. Beside a figure of two processes stands
the ceiling: how many times faster than one process two are that never talk, in the same turns. `sync-quality` (a
quarter of an hour of training) and `small-tables` run only where `--only` names them. `--quick` makes every row small,
to see that it runs; its figures mean nothing. Last line: one JSON object.
"""

import hybrid_shared_memory
import hybrid_small_tables
import hybrid_sync
import hybrid_towers
from harness import command_line

ROWS = {
    "towers": hybrid_towers.rows,
    "sync": hybrid_sync.rows,
    "shared-memory": hybrid_shared_memory.rows,
}
STUDIES = {
    "sync-quality": hybrid_sync.quality,
    "small-tables": hybrid_small_tables.rows,
}
ROWS |= STUDIES

if __name__ == "__main__":
    command_line(__doc__, ROWS, turns=3, studies=list(STUDIES))
