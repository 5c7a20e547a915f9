"""A batch survives what TorchRec's pipelines do to it."""

import pytest
import torch

from tests.examples import batches
from torchrec_ext.batch import SharedRows, TowerBatch

pytestmark = pytest.mark.unit


def batch() -> TowerBatch:
    made = next(batches(1))
    made.log_q = torch.arange(len(made)).float()
    made.shared = SharedRows(
        sparse=next(batches(1, seed=2)).sparse,
        dense=torch.rand(24, 3),
        index=torch.arange(24),
    )
    made.targets = torch.rand(24, 2)
    return made


def parts(made: TowerBatch) -> list[torch.Tensor]:
    assert made.log_q is not None
    assert made.targets is not None
    assert made.shared is not None
    return [
        made.targets,
        made.shared.sparse.values(),
        made.shared.sparse.lengths(),
        made.shared.dense,
        made.shared.index,
        made.sparse.values(),
        made.sparse.lengths(),
        made.dense,
        made.labels,
        made.weights,
        made.total_weight,
        made.log_q,
    ]


def test_a_batch_moves_whole(device: torch.device) -> None:
    made = batch()
    moved = made.to(device, non_blocking=True)
    assert all(part.device.type == device.type for part in parts(moved))
    for before, after in zip(parts(made), parts(moved), strict=True):
        torch.testing.assert_close(after.cpu(), before, rtol=0, atol=0)
    assert moved.sparse.keys() == made.sparse.keys()
    assert len(moved) == len(made)
    made.log_q = None
    assert made.to(device).log_q is None


def test_the_ids_of_several_features_are_columns() -> None:
    made = next(batches(1))
    ids = made.ids(["item_id", "history"])
    assert ids.shape == (24, 2)
    for column, name in enumerate(("item_id", "history")):
        first = [bag[0] if bag else 0 for bag in map(list, made.bags(name).to_dense())]
        assert ids[:, column].tolist() == first


def test_pinning_and_recording_reach_every_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a GPU does to each tensor, counted where there is none."""
    made, pinned, recorded = batch(), [], []
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda tensor: pinned.append(tensor.data_ptr()) or tensor,
    )
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: recorded.append(tensor.data_ptr()),
    )
    made.pin_memory()
    made.record_stream(None)  # type: ignore[arg-type]
    for tensor in parts(made):
        assert tensor.data_ptr() in pinned
        assert tensor.data_ptr() in recorded
