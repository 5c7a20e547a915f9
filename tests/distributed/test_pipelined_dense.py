"""Pipelined over two gloo ranks equals unpipelined: loss, gradients of every layer, and those of the look-ups in front of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.contracts import run_ranks
from torchrec_ext.distributed.pipelined_dense import PipelinedDense, cut
from torchrec_ext.distributed.runtime import Runtime

ROWS, DIM, DEPTH = 24, 8, 6


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(DIM, 1))


def tables() -> EmbeddingBagCollection:
    torch.manual_seed(1)
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", feature_names=["f"], num_embeddings=10, embedding_dim=DIM)],
        device=torch.device("cpu"),
    )


def batch() -> tuple[KeyedJaggedTensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(10, (ROWS,), generator=draw)
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(ROWS, dtype=torch.int32))
    return features, torch.randint(2, (ROWS, 1), generator=draw).float()


def pipelined(runtime: Runtime, microbatches: int, schedule: Any, lr: float) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps, and this rank's weights after them."""
    dense = PipelinedDense(
        layers(), runtime, loss=binary_cross_entropy_with_logits, microbatches=microbatches, schedule=schedule
    )
    collection, (features, labels) = tables(), batch()
    own = [*dense.stage.parameters(), *(collection.parameters() if dense.is_first else [])]
    optimizer = torch.optim.SGD(own, lr)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        pooled = collection(features).values() if dense.is_first else None
        loss = dense.step(pooled, labels)
        assert (loss is None) == (not dense.is_last)
        losses.append(float(loss) if loss is not None else 0.0)
        optimizer.step()
    weights = {f"{runtime.rank}.{name}": weight.detach() for name, weight in dense.stage.named_parameters()}
    return losses, weights | ({"table": collection.state_dict()["embedding_bags.t.weight"]} if dense.is_first else {})


def whole(lr: float) -> tuple[list[float], dict[str, Tensor]]:
    dense, collection, (features, labels) = layers(), tables(), batch()
    optimizer = torch.optim.SGD([*dense.parameters(), *collection.parameters()], lr)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(dense(collection(features).values()), labels)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    parts = {
        f"{place}.{name}": w.detach() for place, part in enumerate(cut(dense, 2)) for name, w in part.named_parameters()
    }
    return losses, parts | {"table": collection.state_dict()["embedding_bags.t.weight"]}


def refused(runtime: Runtime) -> list[str]:
    told = []
    for call in (
        lambda: PipelinedDense(layers(), runtime, loss=binary_cross_entropy_with_logits, microbatches=1),
        lambda: PipelinedDense(layers(), runtime, loss=binary_cross_entropy_with_logits, schedule="zigzag"),  # type: ignore[arg-type]
        lambda: PipelinedDense(nn.Sequential(nn.Linear(4, 1)), runtime, loss=binary_cross_entropy_with_logits),
        lambda: PipelinedDense(layers(), runtime, loss=binary_cross_entropy_with_logits, microbatches=5).step(
            torch.zeros(ROWS, DIM), torch.zeros(ROWS, 1)
        ),
        lambda: PipelinedDense(layers(), runtime, loss=binary_cross_entropy_with_logits).step(None, None),
    ):
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return told


def laws(runtime: Runtime) -> tuple[list[Any], list[str]]:
    return [pipelined(runtime, *arguments, 0.5) for arguments in ((4, "1f1b"), (2, "gpipe"), (8, "gpipe"))], refused(
        runtime
    )


@pytest.fixture(scope="module")
def by_rank() -> list[Any]:
    return run_ranks(laws, 2)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["4 in 1f1b", "2 in gpipe", "8 in gpipe"])
def test_two_stages_learn_what_one_process_learns(by_rank: list[Any], which: int) -> None:
    losses, expected = whole(0.5)
    (_, first), (last, second) = (found[which] for found, _ in by_rank)
    assert last == pytest.approx(losses, abs=1e-6)
    learned = {**first, **second}
    assert learned.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(learned[name], weight, atol=1e-6, rtol=0, msg=name)
    before = tables().state_dict()["embedding_bags.t.weight"]
    assert (expected["table"] - before).abs().max() > 1e-4, "the look-ups in front have learned"


def test_what_cannot_be_pipelined_is_told_on_every_rank(by_rank: list[Any]) -> None:
    for rank, (_, told) in enumerate(by_rank):
        assert told[0].startswith("microbatches=1: must be at least the number of stages, 2")
        assert told[1] == "schedule='zigzag': must be one of 1f1b, gpipe"
        assert told[2].startswith("stages=2: the dense part has 1 layers with weights")
        name, place = ("inputs", "first") if rank == 0 else ("targets", "last")
        assert told[3].startswith(f"{name}: 24 rows in microbatches=5: must be a multiple")
        assert told[4] == f"{name}: None on the {place} rank, which reads them"


@pytest.mark.unit
def test_the_cut_makes_the_largest_stage_as_small_as_can_be() -> None:
    wide = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1)
    )
    assert [[type(layer).__name__ for layer in part] for part in cut(wide, 3)] == [
        ["Linear", "ReLU"],
        ["Linear", "ReLU"],
        ["Linear", "ReLU", "Linear"],
    ]
