"""examples/ncf_adopted.py on several processes, which average their weights every 32 steps (local SGD).

torchrun --standalone --nproc-per-node 2 examples/local_sgd_adopted.py [FILE] [POSITIVES] [EPOCHS]
"""

import sys

import torch
from ncf_adopted import ITEMS, NEGATIVES, ContextualNCF, Interactions
from torch import nn

from torchrec_ext.adopt import Rows, Uniform, adopt
from torchrec_ext.distributed import LocalSGD, Runtime


def main(runtime, path="ncf.pt", positives=83_731, epochs=3):
    torch.manual_seed(0)
    data, model, loss_fn = (
        Interactions(int(positives)),
        ContextualNCF(),
        nn.BCEWithLogitsLoss(),
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rows = Rows(
        {"user": data.user, "item": data.item, "context": data.context},
        256,
        negatives=Uniform(ITEMS, draws=NEGATIVES, exclude=("user", "item")),
        rank=runtime.rank,
        ranks=runtime.world_size,
    )
    step = adopt(model, optimizer, lambda *batch: loss_fn(model(*batch[:3]), batch[3]))
    with LocalSGD(model, step, every=32) as ranks:
        # in place of DistributedDataParallel(model)
        for epoch in range(int(epochs)):
            total = 0.0
            for loss in step.epoch(rows):
                total += loss.item()
            ranks.settle()  # equal on all ranks, for an evaluation or a checkpoint
            if runtime.is_main:
                print(f"epoch {epoch + 1}: loss {total / len(rows):.4f}")
    if runtime.is_main:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    with Runtime.start("cpu") as runtime:
        main(runtime, *sys.argv[1:])
