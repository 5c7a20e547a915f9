"""`python -m torchrec_ext.probe`: imports the triple, looks two rows up, and prints the result as one JSON line.

It runs as a separate process, because a mixed triple may end it without an exception.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time


def main() -> None:
    """Prints {"seconds", "answer", "threads", "gpus", "no_shared_memory"}; `answer` is [8.0, 10.0] when it is right."""
    start = time.perf_counter()
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EmbeddingBagConfig(
        name="t", embedding_dim=2, num_embeddings=4, feature_names=["f"]
    )
    bags = EmbeddingBagCollection(tables=[config], device=torch.device(device))
    with torch.no_grad():
        bags.embedding_bags["t"].weight.copy_(torch.arange(8.0).reshape(4, 2))
    ids = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([1, 3]), lengths=torch.tensor([2])
    ).to(torch.device(device))
    answer = bags(ids).values()[0].tolist()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report = {
        "seconds": round(time.perf_counter() - start, 1),
        "answer": answer,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "no_shared_memory": _no_shared_memory(),
    }
    print(json.dumps(report))


def _no_shared_memory() -> str:
    """Returns why ranks of one host cannot share memory; empty if they can."""
    try:
        # While an image is built, the package is not there as a whole.
        from torchrec_ext.distributed.shared_memory import library

        library.load()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    # An import makes objects that stay. Collecting them took a seventh of the time and
    # freed nothing.
    gc.disable()
    main()
    sys.stdout.flush()
    # The answer is out. To take torch down in order would cost half a second.
    os._exit(0)
