"""EventLog gives each event once and in order, and names a file that is not as it was."""

import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from torchrec_ext.data.files.event_log import EventLog
from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def config(folder: Path, **settings: Any) -> EventsConfig:
    return EventsConfig(folder=str(folder), **settings)


def line(user: int, item: int = 1, **more: Any) -> str:
    return json.dumps({"user_id": user, "item_id": item, **more}) + "\n"


def write(folder: Path, name: str, users: list[int]) -> None:
    """Writes a file of events and renames it in."""
    hidden = folder / f"_{name}"
    hidden.write_text("\n".join(line(user, x={"y": [1]}) for user in users)[:-1])
    hidden.rename(folder / name)


def test_events_come_once_and_in_order_of_files(tmp_path: Path) -> None:
    """Files come at any time, and the reader begins anew at a saved place at any time."""
    chance = random.Random(3)
    ids = [chance.randrange(-(2**63) + 1, 2**63) for _ in range(900)]
    log = EventLog(config(tmp_path))
    users: list[int] = []
    written = number = 0
    while len(users) < len(ids):
        if written < len(ids) and chance.random() < 0.4:
            count = chance.randrange(0, 150)
            ending = chance.choice(("jsonl", "ndjson"))
            write(tmp_path, f"part-{number}.{ending}", ids[written : written + count])
            written += count
            number += 1
        events = log.read(chance.randrange(1, 60))
        users.extend(events["user"].values.tolist())
        if chance.random() < 0.3:
            state = json.loads(json.dumps(log.state_dict()))
            assert list(state) == ["file", "row", "read"]
            if state["file"]:
                assert list(state["read"])[-1] == state["file"]
                assert set(state["read"]) <= {path.name for path in tmp_path.iterdir()}
            # Files before the position may go.
            for name in ("part-0.jsonl", "part-0.ndjson"):
                if state["file"] > "part-3":
                    (tmp_path / name).unlink(missing_ok=True)
            log = EventLog(config(tmp_path))
            log.load_state_dict(state)
    assert users == ids
    assert number > 10, "part-9 precedes part-10"
    assert not log.read(9).num_rows


def test_a_label_and_a_time_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        line(1, 2, clicked=0.25, at=1e9) + line(3, 4, clicked=1, at=2e9)
    )
    events = EventLog(config(tmp_path, label="clicked", time="at")).read(9)
    assert [
        column.tolist() for column in (each.values for each in events.values())
    ] == [
        [1, 3],
        [2, 4],
        [0.25, 1.0],
        [1e9, 2e9],
    ]


def test_a_last_line_needs_no_end(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("\n" + line(5) + "\n" + line(6).strip())
    (tmp_path / "c.jsonl").touch()
    assert EventLog(config(tmp_path)).read(9)["user"].values.tolist() == [5, 6]


def test_entries_that_are_left_out_are_counted_and_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.JSONL").write_text(line(1))
    for name in ("a-2.csv.gz", "b.parquet", "_part.jsonl", ".hidden"):
        (tmp_path / name).write_text("user_id,item_id\n3,4\n")
    (tmp_path / "day=1").mkdir()
    log = EventLog(config(tmp_path))
    with pytest.warns(UserWarning, match=r"entries left out: 3, such as a-2\.csv\.gz"):
        assert log.read(9)["user"].values.tolist() == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not log.read(9).num_rows
    (tmp_path / "c.csv.gz").touch()
    with pytest.warns(UserWarning, match=r"entries left out: 1, such as c\.csv\.gz"):
        log.read(9)


LABEL = {"label": "clicked"}
BOTH = {**LABEL, "time": "at"}


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (line(1) + line("7"), {}, r"line 2: .*user_id.*string_ids\(\)"),  # type: ignore[arg-type]
        (line(1) + line(2**63), {}, "line 2: .*user_id.*int64"),
        (line(1.5), {}, "line 1: .*float.*user_id.*int64"),  # type: ignore[arg-type]
        ('{"user_id": 1}\n', {}, "line 1: .*item_id.*mend the line"),
        (line(1) + "7\n", {}, "line 2: .*int"),
        (line(1) * 999 + line(2)[:-3] + "\n" + line(3), {}, "line 1000: "),
        (line(1, x=1).replace("1}", "[" * 9999), {}, "line 1: "),
        (line(1, at=1), BOTH, "line 1: .*clicked"),
        (line(1, clicked=1, at="2026-11-29"), BOTH, "line 1: .*at.*seconds since"),
        (line(1, clicked=1) + line(1, clicked=3), LABEL, "line 2: .*clicked.*0 to 1"),
        (line(1, clicked="yes"), LABEL, "line 1: .*clicked"),
        (line(1, clicked=None), LABEL, "line 1: .*clicked"),
    ],
)
def test_what_is_no_event_is_named_in_one_line(
    tmp_path: Path, content: str, settings: dict[str, str], message: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=rf"^{file}: .*{message}") as caught:
        EventLog(config(tmp_path, **settings)).read(9)
    text = str(caught.value).removeprefix(str(tmp_path))
    assert len(text) < 200
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "users"),
    [("a", [8, 9]), ("a", [1, 2, 3]), ("b", [9, 8]), ("b", [3, 4, 5])],
)
def test_a_file_that_was_changed_between_two_runs_is_named(
    tmp_path: Path, name: str, users: list[int]
) -> None:
    """Of as many rows or more, the last one or an earlier one."""
    write(tmp_path, "a.jsonl", [1, 2])
    write(tmp_path, "b.jsonl", [3, 4])
    log = EventLog(config(tmp_path))
    assert log.read(9).num_rows == 4
    state = json.loads(json.dumps(log.state_dict()))
    # The bytes count, and not the time: a copy is the file that was read.
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, 1))
    again = EventLog(config(tmp_path))
    again.load_state_dict(state)
    assert not again.read(9).num_rows
    write(tmp_path, f"{name}.jsonl", users)
    with pytest.raises(DataError) as caught:
        EventLog(config(tmp_path)).load_state_dict(state)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}.jsonl: was changed after it was read")
    assert len(message.removeprefix(str(tmp_path))) < 200
    if (name, len(users)) == ("b", 3):
        with pytest.raises(DataError, match=r"was changed .*: has \d+ bytes, and had"):
            log.read(9)
    (tmp_path / f"{name}.jsonl").unlink()
    if name == "b":
        with pytest.raises(DataError, match=r"b\.jsonl: is gone, and 2 of its"):
            again.load_state_dict(state)
        return
    # Whoever has removed an earlier one does not need it.
    again.load_state_dict(state)
    assert list(again.state_dict()["read"]) == ["b.jsonl"]


def test_a_file_that_comes_too_late_between_two_runs_is_named(tmp_path: Path) -> None:
    write(tmp_path, "2.jsonl", [2])
    write(tmp_path, "3.jsonl", [3])
    log = EventLog(config(tmp_path))
    assert log.read(1).num_rows == 1
    position = log.position
    assert log.read(1).num_rows == 1
    # The log has read further than the position.
    states = log.state_dict(position), log.state_dict()
    assert [list(state["read"]) for state in states] == [
        ["2.jsonl"],
        ["2.jsonl", "3.jsonl"],
    ]
    for name in ("_1.jsonl", "1.csv"):
        (tmp_path / name).touch()
    for state in states:
        EventLog(config(tmp_path)).load_state_dict(state)
    write(tmp_path, "1.jsonl", [1])
    with pytest.raises(DataError, match=r"1\.jsonl: came after 3\.jsonl was read"):
        log.read(9)
    for state, last in zip(states, ("2", "3"), strict=True):
        with pytest.raises(
            DataError,
            match=rf"1\.jsonl: came after {last}\.jsonl was read, and precedes",
        ):
            EventLog(config(tmp_path)).load_state_dict(state)


def test_there_must_be_a_folder() -> None:
    with pytest.raises(
        DataError, match="folder=nosuch: no such folder; name the folder"
    ):
        EventLog(EventsConfig(folder="nosuch"))
    with pytest.raises(ValueError, match=r"data\.batch_s=-1: must be 0 or more"):
        EventsConfig(batch_s=-1)
    with pytest.raises(ValueError, match=r"data\.time='user_id': .*each column once"):
        EventsConfig(time="user_id")
