"""One preprocessing run: fit on the first split, transform all, save, report."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from tqdm import tqdm

from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.data.preprocess.engines import Engine, connected
from torchrec_ext.data.preprocess.writing import whole_folder
from torchx_apps.preprocess_recipes import Prepared, PreprocessJob
from torchx_apps.preprocess_report import draw, label_rates, missing_shares, table_text, unknown_shares


def run(job: PreprocessJob) -> Path:
    """Writes ``out/<split>/*.parquet``, ``out/preprocessor/``, ``out/summary.json`` and ``out/preprocess.png``.

    The folder appears when all of it is written.

    Raises:
        DataError: the data do not allow it; the message says what to do.
    """
    out = Path(job.out or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    begun = time.monotonic()
    with (
        whole_folder(out, overwrite=job.overwrite) as staging,
        connected(job.engine, threads=job.threads, memory=job.memory) as engine,
    ):
        prepared = job.build(job.config, engine)
        fitted = _fit(prepared, engine)
        fitted.save(staging / "preprocessor")
        rows = {name: _transform(prepared, fitted, name, staging, engine) for name in prepared.splits}
        summary = _report(job, prepared, fitted, rows, staging, engine)
    seconds = time.monotonic() - begun
    print(f"\n{summary}\n\n{sum(rows.values()):,} rows in {seconds:.1f} s with {engine.name}; written to {out}", flush=True)
    return out


def _fit(prepared: Prepared, engine: Engine) -> FittedPreprocessor:
    first, source = next(iter(prepared.splits.items()))
    steps = prepared.preprocessor.steps
    with tqdm(total=len(steps), desc=f"fit on {first}", unit="step") as bar:

        def begin(step: str) -> None:
            bar.set_postfix_str(step)
            bar.update()

        return prepared.preprocessor.fit(source, engine=engine, events=prepared.events, progress=begin)


def _transform(prepared: Prepared, fitted: FittedPreprocessor, split: str, folder: Path, engine: Engine) -> int:
    with tqdm(desc=f"transform {split}", unit=" rows", unit_scale=True) as bar:

        def written(rows: int) -> None:
            bar.update(rows - bar.n)

        rows = fitted.transform(prepared.splits[split], folder / split, events=prepared.events, engine=engine, progress=written)
        bar.update(rows - bar.n)
        return rows


def _report(
    job: PreprocessJob, prepared: Prepared, fitted: FittedPreprocessor, rows: dict[str, int], folder: Path, engine: Engine
) -> str:
    source = next(iter(prepared.splits.values()))
    missing = missing_shares(source, prepared.preprocessor.raw_columns, engine)
    unknown = {split: unknown_shares(folder / split, fitted, engine) for split in rows}
    summary = {
        "recipe": job.name,
        "config": dataclasses.asdict(job.config),
        "engine": engine.name,
        "rows": rows,
        "columns": fitted.outputs,
        "vocab": fitted.vocab,
        "dense": list(fitted.dense),
        "missing": missing,
        "unknown": unknown,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
    if job.pictures:
        draw(folder / "preprocess.png", fitted, missing, label_rates(source, prepared.label, prepared.time, engine))
    return table_text(fitted, missing, unknown)
