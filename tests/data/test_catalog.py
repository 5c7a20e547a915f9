from __future__ import annotations

import errno
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data import catalog as datasets
from torchrec_ext.data import catalog as download
from torchrec_ext.data.catalog import (
    DatasetUnavailable,
    Download,
    fetch,
    sha256,
)
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.movielens import GENRES, from_parquet
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.sets import load_dataset
from torchrec_ext.schema import DataError

RATINGS = "196\t242\t3\t881250949\n196\t1\t5\t881250950\n196\t3\t4\t881250951\n22\t242\t1\t878887116\n"
USERS = "22|25|M|writer|40206\n196|49|F|other|V0R2M\n"
FLAGS = {name: place for place, name in enumerate(("unknown", *GENRES))}


def movie(number: int, title: str, *genres: str) -> str:
    flags = "|".join("1" if name in genres else "0" for name in FLAGS)
    return f"{number}|{title}|01-Jan-1995||http://example.org/|{flags}\n"


MOVIES = (
    movie(1, "Toy Story (1995)", "Animation", "Comedy")
    + movie(3, "Misérables, Les (1998)", "Drama")
    + movie(242, "Land Before Time III (1995) (V)", "Animation")
    + movie(267, "unknown", "unknown")
)


def publish(
    path: Path, ratings: str = RATINGS, users: str = USERS, movies: str = MOVIES
) -> Download:
    """A zip in the publisher's form, and where to get it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("u.data", ratings), ("u.user", users), ("u.item", movies)):
            archive.writestr(f"ml-100k/{name}", text.encode("latin-1"))
    return Download(url=path.as_uri(), size=path.stat().st_size, sha256=sha256(path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no data folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHREC_EXT_DATA", raising=False)
    return tmp_path


@pytest.fixture
def publisher(home: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    source = publish(home / "published.zip")
    monkeypatch.setattr(datasets, "ML_100K", source)
    return source


def same(left: Any, right: Any) -> bool:
    return sorted(left) == sorted(right) and all(
        np.array_equal(left[name].values, right[name].values)
        and np.array_equal(left[name].lengths, right[name].lengths)
        for name in left
    )


@pytest.mark.unit
def test_the_set_is_downloaded_once_and_then_found_in_the_cache(
    publisher: Download, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = load_dataset("ml-100k")
    shown = capfd.readouterr().err
    assert "research use only" in shown
    assert "Harper" in shown
    assert "100%" in shown
    (home / "published.zip").unlink()
    again = load_dataset("ml-100k")
    assert capfd.readouterr().err == ""
    assert same(data.rows("train"), again.rows("train"))
    cached = home / "cache" / "torchrec_ext" / "ml-100k"
    assert sorted(path.name for path in cached.iterdir()) == [".lock", "ml-100k.zip"]


@pytest.mark.unit
def test_the_publishers_text_becomes_features(publisher: Download) -> None:
    data = load_dataset("ml-100k", progress=False)
    # User 196 takes 242, 1 and 3; with 22's item 242 is all that is trained on.
    assert data.values_of("item_id").tolist()[1:] == [242]
    assert data.titles[1] == "Land Before Time III"
    assert data.num_items == 1
    assert data.values_of("user_id")[data.rows("test")["user_id"].values].tolist() == [
        196
    ]
    raw = pq.read_table(data.folder / "raw/users.parquet").to_pydict()
    assert raw["zip_prefix"] == ["4", "Canada"], "a Canadian code starts with a letter"
    assert raw["age"] == [25.0, 49.0]
    assert raw["history"] == [[], [242, 1]], "as before the test item"
    items = pq.read_table(data.folder / "raw/items.parquet").to_pydict()
    assert items["release_year"] == [1995]
    assert items["genres"] == ["Animation"]


@pytest.mark.unit
def test_two_processes_at_once_leave_one_whole_file(
    publisher: Download, home: Path
) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(
                load_dataset("ml-100k", progress=False).rows("train").num_rows
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2] * 4


@pytest.mark.unit
def test_a_publisher_out_of_reach_is_unavailable_and_leaves_nothing(
    publisher: Download, home: Path
) -> None:
    (home / "published.zip").unlink()
    with pytest.raises(
        DatasetUnavailable,
        match=r"was not downloaded \(No such file.*\): put file://.*published\.zip",
    ):
        load_dataset("ml-100k", progress=False)
    assert [
        path.name for path in (home / "cache" / "torchrec_ext" / "ml-100k").iterdir()
    ] == [".lock"]


@pytest.mark.unit
def test_a_folder_whose_file_system_has_no_locks_is_downloaded_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(download.fcntl, "flock", refuse)
    source = publish(home / "published.zip")
    assert (
        fetch(source, home / "kept" / "ml-100k.zip", licence="", progress=False) is None
    )
    assert (home / "kept" / "ml-100k.zip").stat().st_size == source.size


@pytest.mark.unit
def test_a_licence_is_shown_for_what_is_downloaded_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = publish(home / "published.zip")
    gone = Download(url=f"{source.url}.gone", size=1, sha256="0")
    assert fetch(
        gone, home / "kept" / "ml-100k.zip", licence="research only", progress=True
    )
    assert "research only" not in capsys.readouterr().err
    assert (
        fetch(
            source,
            home / "kept" / "ml-100k.zip",
            licence="research only",
            progress=True,
        )
        is None
    )
    assert "research only" in capsys.readouterr().err


@pytest.mark.unit
def test_another_file_than_the_published_one_is_refused_and_not_kept(
    home: Path,
) -> None:
    source = publish(home / "published.zip")
    other = Download(url=source.url, size=source.size, sha256="0" * 64)
    with pytest.raises(
        DataError,
        match=rf"sha256 {source.sha256}, the publisher's file has .*sha256 {'0' * 64}; delete it",
    ):
        fetch(other, home / "kept" / "ml-100k.zip", licence="", progress=False)
    assert [path.name for path in (home / "kept").iterdir()] == [".lock"]


@pytest.mark.unit
def test_a_damaged_zip_in_the_folder_is_refused(
    publisher: Download, home: Path
) -> None:
    folder = home / "data" / "ml-100k"
    folder.mkdir(parents=True)
    (folder / "ml-100k.zip").write_bytes((home / "published.zip").read_bytes()[:-7])
    with pytest.raises(
        DataError, match=r"data/ml-100k/ml-100k\.zip: .* the publisher's file has"
    ):
        load_dataset("ml-100k", folder=str(home / "data"))


@pytest.mark.unit
def test_a_text_file_of_another_form_names_file_and_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        datasets, "ML_100K", publish(home / "published.zip", users="22|25|M|writer\n")
    )
    with pytest.raises(DataError, match=r"u\.user line 1 has 4 fields, must have 5"):
        load_dataset("ml-100k", progress=False)


def test_the_parquet_files_and_the_publishers_zip_give_the_same_data(
    ml_100k: Prepared,
    ml_100k_folder: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ratings, people, movies = from_parquet(ml_100k_folder)

    def lines(separator: str, *columns: Any) -> str:
        return "".join(
            separator.join(map(str, row)) + "\n" for row in zip(*columns, strict=True)
        )

    titles = [
        "unknown"
        if year == "unkonwn"
        else f"{title} (V)"
        if year == "V"
        else f"{title} ({year})"
        for title, year in zip(
            movies["movie_title"].values, movies["release_year"].values, strict=True
        )
    ]
    numbers = movies["item_id"].values.tolist()
    genres = [names.split() for names in movies["class"].values]
    source = publish(
        home / "published.zip",
        ratings=lines(
            "\t",
            *(
                ratings[name].values
                for name in ("user_id", "item_id", "rating", "timestamp")
            ),
        ),
        users=lines(
            "|",
            *(
                people[name].values
                for name in ("user_id", "age", "gender", "occupation", "zip_code")
            ),
        ),
        movies="".join(
            movie(number, title, *names)
            for number, title, names in zip(numbers, titles, genres, strict=True)
        ),
    )
    monkeypatch.setattr(datasets, "ML_100K", source)
    data = load_dataset("ml-100k", progress=False)
    assert data.titles == ml_100k.titles
    assert data.vocab == ml_100k.vocab
    assert same(data.items, ml_100k.items)
    for part in ("train", "validation", "test"):
        assert same(data.rows(part), ml_100k.rows(part))


def test_movielens_has_the_figures_of_its_readme(ml_100k: Prepared) -> None:
    assert ml_100k.vocab["user_id"] == 944
    assert ml_100k.licence is not None
    assert ml_100k.rows("validation").num_rows == ml_100k.rows("test").num_rows == 943
    assert ml_100k.rows("train").num_rows == 100_000 - 2 * 943
    assert ml_100k.titles[1] == "Toy Story"
    assert "unkonwn" not in ml_100k.titles


@pytest.mark.unit
def test_a_set_that_does_not_exist_is_told_with_those_that_do(home: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"set 'ml-1b' is not on this machine",
    ):
        load_dataset("ml-1b")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history_length": -1}, r"data\.history_length=-1: must be 0 or more"),
        ({"name": "ml-100k", "users": 5}, r"data\.users=5: ml-100k has its own"),
        ({"name": "planted", "items": 0}, r"data\.items=0: must be 1 or more"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)
