"""Files that a test reads: whole parquet files as the package's reader has them, and those of a run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_ext.data.columns import Chunk, concatenate_rows
from torchrec_ext.data.files.sources import ParquetSource


def read_parquet(paths: Any, names: Sequence[str] = ()) -> Chunk:
    """The columns ``names`` of files, all by default."""
    source = ParquetSource(paths)
    names = names or source.columns
    return concatenate_rows(
        [source.read(group, names) for group in source.groups], names
    )


# entries of a record that are measured
TIMES = {"rows_per_s", "data_wait", "ranks_wait", "events_per_s"}


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, or of a prepared folder."""
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """A run's records so far of some kinds, by default all but ``steps``, which are measured; without times."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    # The last one may be being written.
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in found
        if (record["kind"] in kinds if kinds else record["kind"] != "steps")
    ]
