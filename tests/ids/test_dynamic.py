"""DynamicIds equals a dictionary, id by id; on any number of ranks, after a save, and in any order of a batch."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import run_ranks
from tests.ids.dictionary import Dictionary, drifting
from torchrec_ext.batch import Fresh
from torchrec_ext.capture.executors import as_it_is, fused_cuda_graph, inductor
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.ids import Dynamic, DynamicIds
from torchrec_ext.ids.index import EMPTY, IdIndex
from torchrec_ext.ids.rows import spread_rows

POLICIES = {
    "every id, room for all": (Dynamic(capacity=12_000), 1),
    "every id, evictions": (Dynamic(capacity=600, half_life=8), 1),
    "second sight": (
        Dynamic(capacity=600, admit_after=2, half_life=8),
        1,
    ),
    "every 4 steps": (Dynamic(capacity=400, admit_after=2), 4),
    "lru": (Dynamic(capacity=600, evict="lru"), 1),
    "ttl": (Dynamic(capacity=5_000, ttl=5, admit_after=3), 2),
    "fewer rows than a batch has ids": (Dynamic(capacity=120), 1),
    "fewer places to wait than a batch has ids": (
        Dynamic(capacity=90, admit_after=3),
        1,
    ),
}


def equals_a_dictionary(
    policy: Dynamic,
    every: int,
    *,
    batches: int,
    size: int,
) -> dict[str, int]:
    """Compares every row, fresh and evicted id of two tables; the map is saved and loaded on the way."""
    names = ("users", "items")
    ids = DynamicIds(dict.fromkeys(names, policy), every=every)
    references = [Dictionary(policy, every) for _ in names]
    stream = drifting(batches, size, len(names), catalogue=4 * size, new=size // 10)
    for number, batch in enumerate(stream):
        rows, notes = ids.step(dict(zip(names, batch, strict=True)))
        fresh = {note.table: note for note in notes}
        for name, reference, values in zip(names, references, batch, strict=True):
            expected_rows, expected_fresh, expected_evicted = reference.step(
                values.tolist()
            )
            note = fresh.get(name, Fresh(name, *(torch.empty(0),) * 3))
            assert rows[name].tolist() == expected_rows
            assert (
                dict(zip(note.rows.tolist(), note.ids.tolist(), strict=True))
                == expected_fresh
            )
            assert note.evicted.tolist() == expected_evicted
        if number % 7 == 3:
            saved = copy.deepcopy(ids.state_dict())
            ids = DynamicIds(dict.fromkeys(names, policy), every=every)
            ids.load_state_dict(saved)
            for name, reference in zip(names, references, strict=True):
                live, live_rows = ids.live_ids(name)
                assert (
                    dict(zip(live_rows.tolist(), live.tolist(), strict=True))
                    == reference.id
                )
                assert torch.equal(ids.rows({name: live})[name], live_rows), (
                    "no two live ids share a row"
                )
    assert ids.counts["refused"] == sum(reference.refused for reference in references)
    return ids.counts


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore:table 'users'|table 'items'")
@pytest.mark.parametrize("name", POLICIES)
def test_it_equals_a_dictionary(name: str) -> None:
    counts = equals_a_dictionary(*POLICIES[name], batches=40, size=240)
    assert counts["lookups"] == 19_200
    assert counts["admitted"] > 0
    assert (counts["evicted"] > 0) == (name != "every id, room for all")
    assert (counts["refused"] > 0) == (name == "fewer rows than a batch has ids")


def shares(runtime: Runtime, policy: Dynamic, every: int) -> dict[str, Any]:
    """Steps by this rank's share of each batch: the rows, the notes of each step, and what is saved in the end."""
    ids = DynamicIds({"users": policy, "items": policy}, every=every)
    rows: list[Tensor] = []
    notes: list[Any] = []
    for users, items in drifting(30, 240, 2, catalogue=900, new=30):
        # Uneven shares: rank 0 has the fewest ids.
        bounds = [
            240
            * number
            * (number + 1)
            // (runtime.world_size * (runtime.world_size + 1))
            for number in range(9)
        ]
        here = slice(bounds[runtime.rank], bounds[runtime.rank + 1])
        found, fresh = ids.step({"users": users[here], "items": items[here]})
        rows.append(torch.stack([found["users"], found["items"]]))
        notes.append(fresh)
    return {"rows": rows, "notes": notes, "state": ids.state_dict()}


def test_ranks_change_nothing() -> None:
    policy = Dynamic(capacity=400, admit_after=2, half_life=3)
    alone = shares(SimpleNamespace(rank=0, world_size=1), policy, 2)  # type: ignore[arg-type]
    for world_size in (2, 3):
        ranks = run_ranks(shares, world_size, policy, 2)
        for rank in ranks:
            assert _same(rank["notes"], alone["notes"])
            assert _same(rank["state"]["tables"], alone["state"]["tables"])
            assert _same(rank["state"]["waiting"], alone["state"]["waiting"])
        for step, expected in enumerate(alone["rows"]):
            assert torch.equal(
                torch.cat([rank["rows"][step] for rank in ranks], dim=1), expected
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(
            _same(*pair) for pair in zip(one, other, strict=True)
        )
    return bool(one == other)


def equal_compiled(engine: Any, device: str = "cpu") -> int:
    """Compares look-ups of an engine with those of the host, evictions and a load on the way; returns their number."""
    policies = {
        "a": Dynamic(capacity=60, admit_after=2, ttl=40),
        "b": Dynamic(capacity=40),
    }
    ids, compiled_ids = (
        DynamicIds(policies, every=2, device=place) for place in ("cpu", device)
    )
    runs = []

    def made(*step: Any) -> Any:
        run = engine(*step)
        return lambda inputs: runs.append(0) or run(inputs)

    compiled_ids.compile_look_ups(made)
    generator = torch.Generator().manual_seed(0)
    for number in range(120):
        # Every fifth batch has other numbers of ids, as the last of an epoch.
        size = 9 if number % 5 == 4 else 16
        batch = {
            "a": torch.randint(-90, 90, (size,), generator=generator),
            "b": torch.randint(0, 70, (size, 2), generator=generator),
        }
        batch["b"][0, 0] = EMPTY
        (rows, notes), (others, other_notes) = (
            each.step(batch) for each in (ids, compiled_ids)
        )
        for name in policies:
            assert others[name].device == torch.empty(0, device=device).device
            assert torch.equal(rows[name], others[name].cpu())
        assert _same(notes, other_notes)
        if number == 60:
            compiled_ids.load_state_dict(copy.deepcopy(compiled_ids.state_dict()))
    assert _same(ids.state_dict(), compiled_ids.state_dict())
    assert ids.counts == compiled_ids.counts
    assert ids.counts["evicted"] > 100
    return len(runs)


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore:table 'b'")
def test_look_ups_that_are_compiled_find_and_count_the_same() -> None:
    assert 80 < equal_compiled(as_it_is) < 100, "all full batches but the first ones"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table 'b'")
def test_look_ups_of_inductor_find_and_count_the_same() -> None:
    assert 80 < equal_compiled(inductor) < 100


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:table 'b'", "ignore:the kernels of the captured")
@pytest.mark.parametrize("engine", [fused_cuda_graph, as_it_is])
def test_look_ups_on_a_gpu_equal_those_on_the_host(engine: Any) -> None:
    assert 80 < equal_compiled(engine, "cuda") < 100


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the kernels of the captured")
def test_between_two_admissions_no_step_waits_for_a_gpu() -> None:
    ids = DynamicIds({"a": Dynamic(capacity=50)}, every=8, device="cuda")
    ids.compile_look_ups(fused_cuda_graph)
    batch = {"a": torch.arange(20, device="cuda")}
    for _ in range(9):
        ids.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            rows, _ = ids.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows["a"].unique().numel() == 20


@pytest.mark.unit
def test_an_id_that_was_absent_for_some_steps_still_counts_as_seen() -> None:
    ids = DynamicIds({"a": Dynamic(capacity=50, admit_after=2)})
    found = []
    for values in ([7, 8], [1, 2, 3], [4, 5], [7, 6]):
        rows, _ = ids.step({"a": torch.tensor(values)})
        found.append(rows["a"].gt(0).tolist())
    assert found[-1] == [True, False]
    assert not any(map(any, found[:-1]))


@pytest.mark.unit
def test_look_ups_that_cannot_be_compiled_stay_as_they_are() -> None:
    ids = _ids(20)
    ids.compile_look_ups(lambda *_: None)
    for _ in range(3):
        rows, _ = ids.step({"a": torch.arange(100, 110)})
    assert rows["a"].all()


@pytest.mark.unit
@pytest.mark.parametrize(
    "ids",
    {
        "ascending": torch.arange(20_000),
        "multiples of 2^32": torch.arange(20_000) << 32,
        "negative": -torch.arange(1, 20_000),
        "ends": torch.tensor([2**63 - 1, -(2**63) + 1, 0, -1]),
    }.items(),
    ids=lambda case: case[0],
)
def test_the_index_finds_all_that_was_inserted_at_once(ids: tuple[str, Tensor]) -> None:
    values = torch.arange(1, len(ids[1]) + 1)
    index = IdIndex([len(ids[1]), 5])
    table = torch.zeros_like(values)
    index.insert(ids[1], table, values)
    assert torch.equal(index.find(ids[1], index.of(table)), values)
    assert not index.find(ids[1] ^ 0x5555, index.of(table + 1)).any(), "another table"
    index.remove(ids[1][::2], index.of(table[::2]))
    expected = values.clone()
    expected[::2] = 0
    assert torch.equal(index.find(ids[1], index.of(table)), expected)


@pytest.mark.unit
def test_a_table_that_has_grown_keeps_its_ids_and_gives_its_new_rows_once() -> None:
    ids = _ids(20)
    ids.step({"a": torch.arange(100, 119)})
    live, rows = ids.live_ids("a")
    grown = _ids(50)
    # Its own ids leave, also from rows that the state does not have.
    grown.step({"a": torch.arange(100, 149)})
    grown.load_state_dict(ids.state_dict())
    assert torch.equal(grown.rows({"a": live})["a"], rows)
    assert torch.equal(grown.live_ids("a")[0], live)
    _, (note,) = grown.step({"a": torch.arange(200, 230)})
    assert not note.evicted.numel()
    assert sorted([*rows.tolist(), *note.rows.tolist()]) == list(range(1, 50))


def test_the_reserved_id_reads_row_0_for_ever() -> None:
    ids = DynamicIds({"items": Dynamic(capacity=10)})
    rows, notes = ids.step({"items": torch.tensor([EMPTY, 5, EMPTY])})
    assert rows["items"].tolist() == [0, int(spread_rows(torch.tensor([1]), 10)), 0]
    assert notes[0].ids.tolist() == [5]
    assert ids.live == {"items": 1}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dynamic(capacity=1), "capacity=1: must be 2 or more"),
        (lambda: Dynamic(capacity=9, ttl=-1), "ttl=-1: must be 0 or more"),
        (lambda: Dynamic(capacity=5.5), "capacity=5.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: Dynamic(capacity=9, ttl="2"), "ttl='2': must be a whole number"),  # type: ignore[arg-type]
        (lambda: DynamicIds({}), "name at least one table"),
        (
            lambda: DynamicIds({"a": Dynamic(capacity=9)}, every=0),
            "every=0: must be 1 or more",
        ),
        (
            lambda: _ids().rows({"b": torch.tensor([1])}),
            "table 'b' has no dynamic ids; the tables are a",
        ),
        (
            lambda: _ids().step({"a": torch.tensor([1.0])}),
            "table 'a': ids are torch.float32, must be an int64 tensor",
        ),
        (
            lambda: _ids(8).load_state_dict(_ids().state_dict()),
            "capacity=8, but 9 rows were saved; a table may only",
        ),
        (
            lambda: _ids().load_state_dict(_ids(name="b").state_dict()),
            "the saved ids are of tables b, not of a",
        ),
        (
            lambda: _ids().load_state_dict({"tables": {"a": {"candidates": []}}}),
            "table 'a': the saved ids are of an earlier version; train anew",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        make()
    assert message in str(error.value)
    assert len(str(error.value)) <= 200


def _ids(capacity: int = 9, name: str = "a") -> DynamicIds:
    return DynamicIds({name: Dynamic(capacity=capacity)})


def test_ids_of_yesterday_make_room_and_ids_that_come_rarely_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    days = DynamicIds({"a": Dynamic(capacity=600)})
    for batch in range(120):
        # Half of the 300 ids of a day are there on the next one too.
        item = (
            torch.rand(256, generator=generator) ** 3 * 300
        ).long() * 7 % 300 + batch // 24 * 150
        days.step({"a": item})
    assert days.counts["admitted"] <= 1.05 * (300 + 4 * 150)
    rare = DynamicIds({"a": Dynamic(capacity=600)})
    for batch in range(100):
        # 400 ids come once in 6 steps each, and three quarters of the look-ups are of
        # an id that comes once.
        regular = torch.randint(400, (64,), generator=generator)
        rare.step({"a": torch.cat([regular, 1_000 + 192 * batch + torch.arange(192)])})
    assert int((rare.live_ids("a")[0] < 400).sum()) > 380


@pytest.mark.unit
def test_steps_without_a_new_id_and_without_an_id() -> None:
    """NVIDIA/recsys-examples #292: a batch of which no key was to be written crashed the kernel."""
    ids = DynamicIds(
        {"a": Dynamic(capacity=9, ttl=2), "b": Dynamic(capacity=9, admit_after=2)}
    )
    nothing = torch.empty(0, dtype=torch.int64)
    ids.step({"a": torch.tensor([5, 6]), "b": nothing})
    for batch in (
        {"a": torch.tensor([6, 5])},
        {"a": nothing, "b": nothing},
        {"b": torch.empty(3, 0).long()},
    ):
        rows, notes = ids.step(batch)
        assert notes == ()
        assert [rows[name].shape for name in batch] == [
            values.shape for values in batch.values()
        ]
    assert ids.rows({"a": torch.tensor([7]), "b": nothing})["a"].tolist() == [0], (
        "nothing but misses"
    )
