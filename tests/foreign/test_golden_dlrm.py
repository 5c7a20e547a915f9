"""TorchRec's golden training (examples/golden_training, DLRM on Criteo) by hybrid_parallel: losses equal to the bit."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.contracts import run_ranks
from torchrec_ext.distributed.optim.config import OptimizerConfig, Override
from torchrec_ext.distributed.optim.declared import apply_optimizer_in_backward
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables

pytestmark = pytest.mark.slow
ROWS, DIM, LR, STEPS = 1000, 16, 0.1, 30


def dlrm() -> nn.Module:
    """The example's model with smaller tables, the dense layers from one seed."""
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=[name],
        )
        for name in DEFAULT_CAT_NAMES
    ]
    torch.manual_seed(0)
    model = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(
            tables=tables, device=torch.device("meta")
        ),
        dense_in_features=len(DEFAULT_INT_NAMES),
        dense_arch_layer_sizes=[64, DIM],
        over_arch_layer_sizes=[64, 1],
        dense_device=torch.device("cpu"),
    )
    return DLRMTrain(model)


def losses(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    rows = RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=32,
        hash_size=ROWS,
        ids_per_feature=1,
        num_dense=len(DEFAULT_INT_NAMES),
        manual_seed=rank,
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches = iter(rows)
    return [float(pipeline.progress(batches)[0]) for _ in range(STEPS)]


def both(runtime: Runtime) -> dict[str, list[float]]:
    stock = dlrm()
    apply_optimizer_in_backward(
        RowWiseAdagrad, stock.model.sparse_arch.parameters(), {"lr": LR}
    )  # type: ignore[union-attr]
    parallel = DistributedModelParallel(
        stock, device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder()]
    )
    initialise_tables(parallel, 7)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=LR),
    )
    results = {"stock": losses(parallel, dense, runtime.rank)}
    # torch's Adagrad has 1e-10 where FBGEMM's has 1e-8.
    ours = OptimizerConfig(
        tables="row_wise_adagrad",
        tables_lr=LR,
        dense="adagrad",
        dense_lr=LR,
        per_layer={"*": Override(eps=1e-10)},
    )
    return results | {
        "ours": losses(
            *hybrid_parallel(
                dlrm(), runtime, plan=parallel.plan, optimizer=ours, seed=7
            ),
            runtime.rank,
        )
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_losses_are_torchrecs_own(world_size: int) -> None:
    for result in run_ranks(both, world_size):
        assert result["ours"] == result["stock"]
        assert len(set(result["stock"])) == STEPS
