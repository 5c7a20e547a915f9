"""`python -m torchrec_ext.probe`: imports the triple, looks two rows up, and prints what it found in two lines.

It runs as a separate process, because a mixed triple may end it without an exception.
"""

from __future__ import annotations

import gc
import os
import sys
import time


def main() -> None:
    """Prints the seconds of the import, and whether ranks of one host can share memory.

    Raises:
        SystemExit: the rows that were looked up are wrong.
    """
    start = time.perf_counter()
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = EmbeddingBagConfig(
        name="t", embedding_dim=2, num_embeddings=4, feature_names=["f"]
    )
    bags = EmbeddingBagCollection(tables=[config], device=device)
    with torch.no_grad():
        bags.embedding_bags["t"].weight.copy_(torch.arange(8.0).reshape(4, 2))
    ids = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([1, 3]), lengths=torch.tensor([2])
    ).to(device)
    answer = bags(ids).values()[0].tolist()
    if answer != [8.0, 10.0]:
        sys.exit(f"a look-up gave {answer} instead of [8.0, 10.0]")
    seconds = time.perf_counter() - start
    print(f"import           the triple imports and looks rows up, {seconds:.1f} s")
    reason = (
        _no_shared_memory() or "ready: ranks of one host use it in place of sockets"
    )
    print(f"shared memory    {reason}")


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
