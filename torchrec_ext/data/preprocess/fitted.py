"""A fitted preprocessor on disk: ``preprocessor.json`` and a parquet file for each vocabulary. No pickle: loading runs no code.

The JSON holds the version of this format, the steps by name with their fields, what they were fitted with, the raw types of the
columns, and the SHA-256 of every vocabulary; ``preprocessor.sha256`` holds that of the JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.preprocess.filling import FillMissing
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.folders import standing, whole_folder
from torchrec_ext.data.preprocess.hashed import Cross, HashBucket
from torchrec_ext.data.preprocess.history import History
from torchrec_ext.data.preprocess.lists import Lists
from torchrec_ext.data.preprocess.numeric import Bucketize, LogClip, Normalize
from torchrec_ext.data.preprocess.step import State, Step
from torchrec_ext.data.preprocess.times import TimeFeatures
from torchrec_ext.data.preprocess.vocabulary import Categorify, Vocabulary
from torchrec_ext.schema import DataError

VERSION = 1
STEPS: Mapping[str, type[Step]] = {
    step.__name__: step
    for step in (Bucketize, Categorify, Cross, FillMissing, HashBucket, History, Lists, LogClip, Normalize, TimeFeatures)
}
_CODECS, _ENCODINGS = ("SNAPPY", "UNCOMPRESSED"), {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_UNPACKED, _ALWAYS = 64, 2**24  # bytes in memory for each byte of a vocabulary's file, of which 3 to 5 are usual, and beside these
_MAIN, _SUM = "preprocessor.json", "preprocessor.sha256"


def save(fitted: FittedPreprocessor, folder: Path, *, overwrite: bool) -> None:
    """Writes the folder, whole or not at all.

    Raises:
        DataError: it is there already, or cannot be written; a step is not one of this package.
    """
    for step in fitted.steps:
        if STEPS.get(type(step).__name__) is not type(step):
            raise DataError(
                f"{folder}: step {step} is not one of this package and could not be loaded; known are {', '.join(STEPS)}"
            )
    with whole_folder(folder, overwrite=overwrite, mark=_MAIN) as staging:
        steps = [_saved(at, step, fitted.states[at], staging) for at, step in enumerate(fitted.steps)]
        main = {"version": VERSION, "keep": list(fitted.keep), "columns": dict(fitted.raw), "steps": steps}
        text = json.dumps(main, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
        (staging / _MAIN).write_text(text)
        (staging / _SUM).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def load(folder: Path) -> FittedPreprocessor:
    """See :meth:`FittedPreprocessor.load`."""
    folder = standing(folder)
    text = _text(folder / _MAIN)
    if hashlib.sha256(text.encode()).hexdigest() != _text(folder / _SUM).strip():
        raise DataError(f"{folder / _MAIN}: does not fit {_SUM}: it was changed or damaged; save it again, or copy the folder anew")
    try:
        return _opened(folder, json.loads(text))
    except DataError:
        raise
    except Exception as error:  # the digests fit: somebody wrote it by hand
        kind = type(error).__name__
        raise DataError(f"{folder / _MAIN}: is not that of a preprocessor ({kind}: {error}); save it again") from None


def _opened(folder: Path, main: Any) -> FittedPreprocessor:
    if main.get("version") != VERSION:
        raise DataError(
            f"{folder / _MAIN}: format version {main.get('version')!r}, this package reads {VERSION}; fit it again, or install the "
            "version of torchrec_ext that wrote it"
        )
    pairs = [_loaded(folder, entry) for entry in main["steps"]]
    return FittedPreprocessor(
        steps=tuple(step for step, _ in pairs),
        keep=tuple(main["keep"]),
        raw=dict(main["columns"]),
        states=tuple(state for _, state in pairs),
    )


def _saved(at: int, step: Step, state: State, folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": type(step).__name__, "fields": dataclasses.asdict(step)}  # type: ignore[call-overload]
    if not isinstance(state, Vocabulary):
        return {**entry, "state": state}
    name = f"vocabulary-{at:03}.parquet"
    table = pa.table({"value": state.values, "count": state.counts})
    pq.write_table(table, folder / name, write_page_checksum=True)
    return {**entry, "vocabulary": name, "rows": len(table), "sha256": _digest(folder / name)}


def _loaded(folder: Path, entry: Mapping[str, Any]) -> tuple[Step, State]:
    name = entry["step"]
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=1)
        hint = f"did you mean {near[0]}?" if near else "install the version of torchrec_ext that wrote it"
        raise DataError(f"{folder / _MAIN}: there is no step {name!r}, known are {', '.join(STEPS)}; {hint}")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry["fields"].items()}
    try:
        step = STEPS[name](**fields)
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder / _MAIN}: step {name}: {error}; fit it again") from error
    return step, _vocabulary(folder, entry) if "vocabulary" in entry else entry["state"]


def _vocabulary(folder: Path, entry: Mapping[str, Any]) -> Vocabulary:
    # The name alone: a path in the file cannot lead out of the folder.
    path = folder / Path(entry["vocabulary"]).name
    if not path.exists():
        raise DataError(f"{path}: no such file, {_MAIN} names it; copy the whole folder")
    if _digest(path) != entry["sha256"]:
        raise DataError(f"{path}: does not have the SHA-256 in {_MAIN}: it was changed or damaged; copy it again")
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_size(path, file.metadata, entry["rows"])
        table = file.read().combine_chunks()
    values, counts = (table[name].chunk(0) if len(table) else table[name].combine_chunks() for name in ("value", "count"))
    return Vocabulary(values, counts)


def _check_size(path: Path, footer: pq.FileMetaData, rows: int) -> None:
    """Refuses a file that unpacks to far more than it has bytes, before it is unpacked.

    Values that stand there once each, as in a vocabulary, take about as much in memory. A few values that are repeated, a codec or
    an encoding that :func:`_saved` does not choose may take thousands of times as much.
    """
    columns = [footer.row_group(group).column(at) for group in range(footer.num_row_groups) for at in range(footer.num_columns)]
    ours = all(column.compression in _CODECS and _ENCODINGS.issuperset(column.encodings) for column in columns)
    most = _UNPACKED * path.stat().st_size + _ALWAYS
    packed = sum(column.total_uncompressed_size for column in columns) + footer.num_rows * 16
    if footer.num_rows != rows or not ours or packed > most or _repeated(path, footer, most) > most:
        size = path.stat().st_size
        raise DataError(
            f"{path}: {footer.num_rows:,} rows in {size:,} bytes, which unpack to more than the {most:,} that are read, or are not "
            f"the {rows:,} in {_MAIN}: it is no vocabulary of this package; fit the preprocessor again"
        )


def _repeated(path: Path, footer: pq.FileMetaData, most: int) -> int:
    """Bytes of the texts that stand in the dictionaries of the column ``value``, as often as its rows name them; at most that."""
    with pq.ParquetFile(path, read_dictionary=["value"]) as file:
        if not pa.types.is_dictionary(file.schema_arrow.field("value").type):
            return 0
        longest = 0
        for group in range(footer.num_row_groups):
            for batch in file.iter_batches(1, row_groups=[group], columns=["value"], use_threads=False):
                longest = max(longest, pc.max(pc.binary_length(batch.column(0).dictionary)).as_py() or 0)
                break  # the first row has all of its group's dictionary
        if longest * footer.num_rows <= most:
            return int(longest * footer.num_rows)
        found = 0
        for chunk in file.read(columns=["value"], use_threads=False)["value"].chunks:
            found += pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
        return int(found)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; name the folder that FittedPreprocessor.save wrote") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); copy the folder again") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
