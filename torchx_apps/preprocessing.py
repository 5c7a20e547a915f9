"""One preprocessing run: fit on the first split, transform all, save, report."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from tqdm import tqdm

from torchrec_ext.data.files import find_files
from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.data.preprocess.engines import Engine, connected
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchx_apps.preprocess_recipes import Prepared, PreprocessJob
from torchx_apps.preprocess_report import Shares, draw, label_rates, missing_shares, need_matplotlib, table_text, unknown_shares

_SUMMARY = "summary.json"


def run(job: PreprocessJob) -> Path:
    """Writes ``out/<split>/*.parquet``, ``out/preprocessor/``, ``out/summary.json`` and ``out/preprocess.png``.

    The folder appears when all of it is written. What can fail without reading all rows fails first.

    Raises:
        DataError: the data do not allow it; the message says what to do.
    """
    out = Path(job.out or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    begun = time.monotonic()
    if job.pictures:
        need_matplotlib()
    with (
        whole_folder(out, overwrite=job.overwrite, mark=_SUMMARY) as staging,
        connected(job.engine, threads=job.threads, memory=job.memory) as engine,
    ):
        prepared = job.build(job.config, engine)
        _keep_sources(out, prepared)
        source = next(iter(prepared.splits.values()))
        rates = label_rates(source, prepared.label, prepared.time, engine) if job.pictures else []
        missing = missing_shares(source, prepared.preprocessor.raw_columns, engine)
        fitted = _fit(prepared, engine)
        fitted.save(staging / "preprocessor")
        rows = {split: _transform(prepared, fitted, split, staging, engine) for split in prepared.splits}
        unknown = {split: unknown_shares(staging / split, fitted, engine) for split in rows}
        _summarise(job, staging / _SUMMARY, fitted, rows, missing, unknown, engine)
        if job.pictures:
            draw(staging / "preprocess.png", fitted, missing, rates)
    seconds = time.monotonic() - begun
    print(f"\n{table_text(fitted, missing, unknown)}\n")
    print(f"{sum(rows.values()):,} rows in {seconds:.1f} s with {engine.name}; written to {out}", flush=True)
    return out


def _keep_sources(out: Path, prepared: Prepared) -> None:
    """An earlier result may be replaced, but not while it is what is read."""
    for source in (*prepared.splits.values(), prepared.events):
        if source is not None and not hasattr(source, "schema"):
            keep_sources(out, find_files(source, (".parquet", ".pq")))


def _fit(prepared: Prepared, engine: Engine) -> FittedPreprocessor:
    first, source = next(iter(prepared.splits.items()))
    with tqdm(total=len(prepared.preprocessor.steps), desc=f"fit on {first}", unit="step", dynamic_ncols=True) as bar:
        done = -1  # a step is told when it begins

        def begin(step: str) -> None:
            nonlocal done
            done += 1
            bar.set_postfix_str(step, refresh=False)
            bar.update(done - bar.n)

        fitted = prepared.preprocessor.fit(source, engine=engine, events=prepared.events, progress=begin)
        bar.set_postfix_str("", refresh=False)
        bar.update(bar.total - bar.n)
    return fitted


def _transform(prepared: Prepared, fitted: FittedPreprocessor, split: str, folder: Path, engine: Engine) -> int:
    with tqdm(desc=f"transform {split}", unit=" rows", unit_scale=True, dynamic_ncols=True) as bar:

        def written(rows: int) -> None:
            bar.update(rows - bar.n)

        rows = fitted.transform(prepared.splits[split], folder / split, events=prepared.events, engine=engine, progress=written)
        written(rows)  # Spark tells no progress of its own
    return rows


def _summarise(
    job: PreprocessJob,
    path: Path,
    fitted: FittedPreprocessor,
    rows: dict[str, int],
    missing: Shares,
    unknown: dict[str, Shares],
    engine: Engine,
) -> None:
    summary = {
        "recipe": job.name,
        "config": dataclasses.asdict(job.config) if dataclasses.is_dataclass(job.config) else None,  # type: ignore[arg-type]
        "engine": engine.name,
        "rows": rows,
        "columns": fitted.outputs,
        "vocab": fitted.vocab,
        "dense": list(fitted.dense),
        "missing": missing,
        "unknown": unknown,
    }
    path.write_text(json.dumps(summary, indent=2, default=str) + "\n")
