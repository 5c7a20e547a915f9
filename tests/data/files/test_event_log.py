"""EventLog gives each event once and in order, however the files grow, and names a file that is not as it was."""

import functools
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.files.event_log import EventLog
from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def config(folder: Path, **settings: Any) -> EventsConfig:
    return EventsConfig(folder=str(folder), **settings)


def line(user: int, item: int = 1, **more: Any) -> str:
    return json.dumps({"user_id": user, "item_id": item, **more}) + "\n"


def test_events_come_once_and_in_order_of_files_that_grow(tmp_path: Path) -> None:
    """Lines are torn anywhere, files are of three formats, and the reader begins anew at a saved place at any time."""
    chance = random.Random(3)
    ids = [chance.randrange(-(2**63) + 1, 2**63) for _ in range(400)]
    texts = ["".join(line(user, 5, other={"x": [1]}) for user in ids[:150])]
    texts.append(
        "item_id,user_id\r\n" + "".join(f"7,{user}\r\n" for user in ids[150:250])
    )
    texts.append("\n" + "".join(line(user) + "\n" for user in ids[350:]))
    parts = {
        "part-9.jsonl": texts[0][:-1],
        "part-10.csv": texts[1],
        "part-12.ndjson": texts[2],
    }
    log = EventLog(config(tmp_path))
    users: list[int] = []

    def follow() -> None:
        nonlocal log
        events = log.read(chance.randrange(1, 60))
        users.extend(events.users.tolist())
        if chance.random() < 0.3:
            state = json.loads(json.dumps(log.state_dict()))
            log = EventLog(config(tmp_path))
            log.load_state_dict(state)

    for name, text in parts.items():
        place = 0
        while place < len(text):
            step = chance.randrange(1, 700)
            with (tmp_path / name).open("a", newline="") as file:
                file.write(text[place : place + step])
            place += step
            follow()
        if name == "part-10.csv":
            whole = pa.table({"user_id": ids[250:350], "item_id": [2] * 100})
            pq.write_table(
                whole,
                tmp_path / "_part-11.parquet",
                row_group_size=40,
                write_page_checksum=True,
            )
            data = (tmp_path / "_part-11.parquet").read_bytes()
            (tmp_path / "part-11.parquet").write_bytes(data[:-9])
            follow()
            (tmp_path / "part-11.parquet").write_bytes(data)
    while len(log.read(0).users) or len(users) < len(ids):
        follow()
    assert users == ids


def test_a_label_and_a_time_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        line(1, 2, clicked=0.25, at=1e9) + line(3, 4, clicked=1, at=2e9)
    )
    events = EventLog(config(tmp_path, label="clicked", time="at")).read(9)
    assert [column.tolist() for column in vars(events).values()] == [
        [1, 3],
        [2, 4],
        [0.25, 1.0],
        [1e9, 2e9],
    ]
    pq.write_table(
        pa.table({"user_id": [5], "item_id": [6], "clicked": [True], "at": [3]}),
        tmp_path / "b.parquet",
        write_page_checksum=True,
    )
    assert EventLog(config(tmp_path, label="clicked", time="at")).read(
        9
    ).labels.tolist() == [0.25, 1.0, 1.0]


def test_an_unfinished_line_waits_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(1) + '{"user_id": 2, "item')
    log = EventLog(config(tmp_path))
    assert log.read(9).users.tolist() == [1]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('_id": 3}\n')
    assert log.read(9).users.tolist() == [2]
    assert not len(log.read(9))


def test_entries_that_are_left_out_are_counted_and_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_text("user_id,item_id\n1,2\n")
    for name in ("a-2.csv.gz", "b.tsv", "_part.parquet", ".hidden"):
        (tmp_path / name).write_text("user_id,item_id\n3,4\n")
    (tmp_path / "day=1").mkdir()
    log = EventLog(config(tmp_path))
    with pytest.warns(UserWarning, match=r"entries left out: 3, such as a-2\.csv\.gz"):
        assert log.read(9).users.tolist() == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not len(log.read(9))
    (tmp_path / "c.csv.gz").touch()
    with pytest.warns(UserWarning, match=r"entries left out: 1, such as c\.csv\.gz"):
        log.read(9)


def test_the_end_that_is_no_event_yet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user_id,item_id\n1,2\n3,4")
    log = EventLog(config(tmp_path))
    assert log.read(9).users.tolist() == [1]
    assert "the last line has no end, so it is not counted" in log.unfinished()
    with (tmp_path / "a.csv").open("a") as file:
        file.write("\n")
    assert log.read(9).users.tolist() == [3]
    assert not log.unfinished()
    (tmp_path / "b.parquet").write_bytes(b"half")
    log.read(9)
    assert "is no whole parquet file" in log.unfinished()


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "a.jsonl",
            line(1) + '{"user_id": "7", "item_id": 1}\n',
            "line 2: 'user_id' is \"7\", must be a whole number",
        ),
        (
            "a.jsonl",
            line(1) + line(2**63),
            "line 2: 'user_id' is 9223372036854775808, must be",
        ),
        (
            "a.jsonl",
            '{"user_id": 1.5, "item_id": 1}\n',
            "line 1: 'user_id' is 1.5, must be a whole number",
        ),
        ("a.jsonl", '{"user_id": 1}\n', "line 1: it has no 'item_id'; mend the line"),
        ("a.jsonl", line(1) + "7\n", "line 2: it has no 'user_id'"),
        ("a.jsonl", line(1) + line(2)[:-3] + "\n", "line 2: it cannot be read: "),
        (
            "a.csv",
            "user_id,item_id\n1,2\n1\n",
            "line 3: it cannot be read: it has 1 values, and the header has 2",
        ),
        (
            "a.csv",
            "user_id,item_id\n1,x\n",
            "line 2: 'item_id' is x, must be a whole number of 64 bits with sign; string_ids() makes",
        ),
        (
            "a.csv",
            "user,item_id\n1,2\n",
            "has no column 'user_id', but user, item_id; set data.user",
        ),
        ("a.csv", "user_id,item_id\n1,\n", "line 2: it has no 'item_id'"),
    ],
)
def test_what_is_no_event_is_named_in_one_line(
    tmp_path: Path, name: str, text: str, fault: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        EventLog(config(tmp_path)).read(9)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}: {fault}")
    assert len(message.removeprefix(str(tmp_path))) < 200
    assert "\n" not in message


def test_a_label_outside_of_0_to_1_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(1, clicked=1) + line(1, clicked=3))
    with pytest.raises(
        DataError, match="line 2: 'clicked' is 3, must be a number from 0 to 1"
    ):
        EventLog(config(tmp_path, label="clicked")).read(9)


def shortened(path: Path) -> None:
    path.write_text(path.read_text()[:30])


def rewritten(path: Path) -> None:
    path.write_text(line(8) * 9)


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("change", [shortened, rewritten, removed])
def test_a_file_that_is_not_as_it_was_read_is_refused(
    tmp_path: Path, change: Callable[[Path], None], resumed: bool
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line(1) + line(2))
    log = EventLog(config(tmp_path))
    assert len(log.read(9)) == 2
    state = log.state_dict()
    change(path)
    again = EventLog(config(tmp_path))
    look = (
        functools.partial(again.load_state_dict, state)
        if resumed
        else functools.partial(log.read, 9)
    )
    with pytest.raises(
        DataError,
        match=r"a\.jsonl: was cut, rewritten or removed after \d+ bytes .*only grow: put it",
    ):
        look()


def test_a_part_that_was_rewritten_is_refused_after_a_resume(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user_id": [1, 2], "item_id": [3, 4]}), tmp_path / "a.parquet"
    )
    log = EventLog(config(tmp_path))
    assert log.read(1).items.tolist() == [3]
    pq.write_table(
        pa.table({"user_id": [1, 9], "item_id": [3, 4]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match="removed after 1 rows of it were read"):
        EventLog(config(tmp_path)).load_state_dict(
            log.state_dict() | {"place": {"place": 1, "seal": "of before"}}
        )


def test_only_the_last_file_may_grow_and_names_rise(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(line(1))
    (tmp_path / "2.jsonl").write_text(line(2))
    log = EventLog(config(tmp_path))
    assert len(log.read(9)) == 2
    (tmp_path / "0.jsonl").write_text(line(0))
    with pytest.raises(
        DataError,
        match=r"0\.jsonl: came when 2\.jsonl was being read already, and precedes it",
    ):
        log.read(9)
    (tmp_path / "0.jsonl").unlink()
    (tmp_path / "1.jsonl").write_text(line(1) * 2)
    with pytest.raises(
        DataError,
        match=r"1\.jsonl: has 58 bytes, and had 29 when the log went on to 2\.jsonl",
    ):
        log.read(9)
    # A file that was read may go, such as by a rotation.
    (tmp_path / "1.jsonl").unlink()
    assert not len(log.read(9))


def test_a_part_that_is_not_whole_is_refused_once_another_follows(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 half")
    log = EventLog(config(tmp_path))
    assert not len(log.read(9))
    (tmp_path / "b.jsonl").write_text(line(1))
    with pytest.raises(
        DataError,
        match=r"a\.parquet: is no whole parquet file, and a later one follows; write parts",
    ):
        log.read(9)


def test_there_must_be_a_folder() -> None:
    with pytest.raises(
        DataError, match="folder=nosuch: no such folder; name the folder"
    ):
        EventLog(EventsConfig(folder="nosuch"))
    with pytest.raises(ValueError, match=r"data\.batch_s=-1: must be 0 or more"):
        EventsConfig(batch_s=-1)
