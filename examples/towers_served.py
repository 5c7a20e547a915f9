"""The model of examples/towers_script.py from its file to a bundle, and a recommendation from it.

python examples/towers_served.py [FILE] [FOLDER]
"""

import sys

import numpy as np
import pyarrow as pa
import torch
from towers_script import UserAndItem

from torchrec_ext import Bundle, Scorer
from torchrec_ext.retrieval import Catalogue, RecommendRequest, export


def main(path: str = "towers.pt", folder: str = "bundle") -> None:
    """Exports the weights in ``path`` with 1,000 items to ``folder``, and ranks them for one user."""
    model = UserAndItem()
    model.load_state_dict(torch.load(path))
    torch.manual_seed(1)
    content, profile = torch.randn(1000, 40), torch.randn(50, 60)
    catalogue = Catalogue(
        ids=np.arange(1000), features=pa.table({"content": content.tolist()})
    )
    # rows by which the bundle is proven to equal the model
    queries = pa.table({"profile": profile.tolist()})
    export(
        model,
        folder,
        catalogue=catalogue,
        queries=queries,
        overwrite=True,
    )

    served = Scorer(Bundle.load(folder)).recommend(
        RecommendRequest(user={"profile": profile[0].tolist()}, k=3)
    )
    with torch.no_grad():
        trained = model.eval()(profile[:1].expand(1000, -1), content).topk(3)
    print("served ", served.items, [f"{score:.5f}" for score in served.scores])
    print(
        "trained",
        trained.indices.tolist(),
        [f"{score:.5f}" for score in trained.values.tolist()],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
