"""What id dropout gives movies that were never seen: MovieLens 100K with a fifth of its movies held out entirely.

    TORCHREC_EXT_DATA=... python benchmarks/cold_start.py [--rates 0 0.1 0.3] [--seeds 3] [--epochs 4]

Two towers under a dot product: user id, gender, occupation and age; movie id, year and genres. No rating of a held-out
movie is trained on, none is drawn as a negative, and its id is looked up as the out-of-vocabulary row. The trained
model ranks the held-out movies for each user who took some of them: `recall@20` of those taken (of 20 at most), and
their AUC, means over users and seeds after the last epoch. Rate 0 is the baseline, the same training without id
dropout; `random` ranks them by chance. The seed moves the held-out movies too. Last line: one JSON object.
"""

import argparse
import importlib.metadata
import json
import statistics

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.datasets.catalog import load_dataset
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.id_dropout import IdDropout, unseen_as_oov
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.tower_model import TowerModel, two_tower

K, DIM, RATE = 20, 32, 3e-3


def model(data: InteractionData, seed: int) -> TowerModel:
    def tables(*names: str) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=data.vocab[name],
                embedding_dim=DIM,
                pooling=PoolingType.MEAN,
            )
            for name in names
        ]

    torch.manual_seed(seed)
    made = two_tower(
        tables("user_id", "gender", "occupation"),
        tables("item_id", "release_year", "genres"),
        user_dense=data.dense,
        interaction="dot",
        shared=("user",),
    )
    initialise_tables(made, seed)
    return made


def scores(data: InteractionData, new: NDArray[np.bool_], rate: float, seed: int, epochs: int) -> NDArray[np.float32]:
    """(users of the test rows, items) after training without the items that are ``new``."""
    made = model(data, seed)
    schema = made.schema()
    feature = schema.feature("item_id")
    assert feature is not None
    train = data.train.take(np.flatnonzero(~new[data.train["item_id"].values]))
    items = unseen_as_oov(data.items, train, feature)
    held_out, users = np.flatnonzero(new), np.arange(1, data.vocab["user_id"])
    avoided = np.concatenate([data.known.users, users.repeat(len(held_out))])
    negatives = UniformNegatives(
        data.num_items, avoided, np.concatenate([data.known.items, np.tile(held_out, len(users))]), seed
    )
    config = LoaderConfig(batch_size=512, negatives=4, seed=seed)
    plain = ChunkLoader(train, schema, config=config, items=items, negatives=negatives)
    loader = IdDropout(plain, schema, {"item_id": rate}, seed=seed)
    optimizer = torch.optim.Adam(made.parameters(), lr=RATE)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            made(batch)[0].backward()
            optimizer.step()
    return ranked(made.eval(), BatchBuilder(schema, items), data.test)


@torch.no_grad()
def ranked(made: TowerModel, builder: BatchBuilder, rows: Chunk) -> NDArray[np.float32]:
    catalogue = made.embed("item", builder.item_batch(np.arange(builder.items.num_rows)))
    made_scores: NDArray[np.float32] = made.interaction.score_all(
        made.embed("user", builder.user_batch(rows)), catalogue
    ).numpy()  # type: ignore[operator]
    return made_scores


def figures(values: NDArray[np.float32], data: InteractionData, new: NDArray[np.bool_]) -> tuple[float, float]:
    """(recall@K, AUC) of each user's movies among those that are ``new``."""
    candidates, pairs = np.flatnonzero(new), data.pairs()
    recalls, aucs = [], []
    for row, user in enumerate(data.test["user_id"].values):
        own = np.isin(candidates, pairs.items[pairs.users == user])
        if 0 < own.sum() < len(own):
            hits = own[np.argsort(-values[row, candidates])]
            recalls.append(hits[:K].sum() / min(K, own.sum()))
            below = (~hits).sum() - np.cumsum(~hits)[hits]
            aucs.append(below.sum() / (own.sum() * (~own).sum()))
    return float(np.mean(recalls)), float(np.mean(aucs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("ml-100k", history_length=1)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        rng = np.random.default_rng(seed)
        new = np.zeros(data.num_items + 1, dtype=bool)
        new[rng.permutation(data.num_items)[: data.num_items // 5] + 1] = True
        runs = {f"rate {rate}": scores(data, new, rate, seed, options.epochs) for rate in options.rates}
        runs["random"] = rng.random((data.test.num_rows, data.num_items + 1)).astype(np.float32)
        for name, values in runs.items():
            found.setdefault(name, []).append(figures(values, data, new))
            print(f"seed {seed}, {name}: recall@{K} {found[name][-1][0]:.4f}, AUC {found[name][-1][1]:.4f}", flush=True)
    means = {
        name: {
            figure: round(statistics.mean(column), 4)
            for figure, column in zip((f"recall@{K}", "auc"), zip(*rows, strict=True), strict=True)
        }
        for name, rows in found.items()
    }
    versions = {package: importlib.metadata.version(package) for package in ("torch", "torchrec")}
    print(
        json.dumps({"benchmark": "cold_start", "seeds": options.seeds, "epochs": options.epochs, **versions, **means})
    )


if __name__ == "__main__":
    main()
