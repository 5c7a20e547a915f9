"""What id dropout gives movies that were never seen: MovieLens 100K with a fifth of its movies held out entirely.

    TORCHREC_EXT_DATA=... python benchmarks/cold_start.py --studies [--quick]

Two towers under a dot product: user id, gender, occupation and age; movie id, year and genres. No rating of a held-out
movie is trained on, none is drawn as a negative, and its id is looked up as the out-of-vocabulary row. The trained
model ranks the held-out movies for each user who took some of them: `recall@20` of those taken (of 20 at most), and
their AUC, means over users and seeds after the last epoch. Rate 0 is the baseline, the same training without id
dropout; `random` ranks them by chance. Three seeds, of which each holds out other movies. Without MovieLens the rows
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from harness import Options, Row, command_line, has_data, row
from numpy.typing import NDArray
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.loader.id_dropout import IdDropout, unseen_as_oov
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.sets import load_dataset
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.tower_model import TowerModel, two_tower

K, DIM, RATE, EPOCHS = 20, 32, 3e-3, 4
RATES = (0.0, 0.1, 0.3)


def model(data: Prepared, seed: int) -> TowerModel:
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


def scores(
    data: Prepared, new: NDArray[np.bool_], rate: float, seed: int, epochs: int
) -> NDArray[np.float32]:
    """(users of the test rows, items) after training without the items that are ``new``."""
    made = model(data, seed)
    schema = made.schema()
    feature = schema.feature("item_id")
    assert feature is not None
    train = data.rows("train").take(
        np.flatnonzero(~new[data.rows("train")["item_id"].values])
    )
    items = unseen_as_oov(data.items, train, feature)
    held_out, users = np.flatnonzero(new), np.arange(1, data.vocab["user_id"])
    avoided = np.concatenate([data.taken("train").users, users.repeat(len(held_out))])
    negatives = UniformNegatives(
        data.num_items,
        avoided,
        np.concatenate([data.taken("train").items, np.tile(held_out, len(users))]),
        seed,
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
    return ranked(made.eval(), BatchBuilder(schema, items), data.rows("test"))


@torch.no_grad()
def ranked(made: TowerModel, builder: BatchBuilder, rows: Chunk) -> NDArray[np.float32]:
    catalogue = made.embed(
        "item", builder.item_batch(np.arange(builder.items.num_rows))
    )
    made_scores: NDArray[np.float32] = made.interaction.score_all(
        made.embed("user", builder.user_batch(rows)), catalogue
    ).numpy()  # type: ignore[operator]
    return made_scores


def figures(
    values: NDArray[np.float32], data: Prepared, new: NDArray[np.bool_]
) -> tuple[float, float]:
    """(recall@K, AUC) of each user's movies among those that are ``new``."""
    candidates, pairs = np.flatnonzero(new), data.taken()
    recalls, aucs = [], []
    for number, user in enumerate(data.rows("test")["user_id"].values):
        own = np.isin(candidates, pairs.items[pairs.users == user])
        if 0 < own.sum() < len(own):
            hits = own[np.argsort(-values[number, candidates])]
            recalls.append(hits[:K].sum() / min(K, own.sum()))
            below = (~hits).sum() - np.cumsum(~hits)[hits]
            aucs.append(below.sum() / (own.sum() * (~own).sum()))
    return float(np.mean(recalls)), float(np.mean(aucs))


def id_dropout(options: Options) -> Iterator[Row]:
    """Yields recall and AUC of each rate of id dropout, against the same training without."""
    if not has_data("id-dropout", "ml-100k"):
        return
    data = load_dataset("ml-100k", history_length=1)
    reached: dict[str, list[tuple[float, float]]] = {}
    for seed in range(1 if options.quick else 3):
        rng = np.random.default_rng(seed)
        new = np.zeros(data.num_items + 1, dtype=bool)
        new[rng.permutation(data.num_items)[: data.num_items // 5] + 1] = True
        epochs = 1 if options.quick else EPOCHS
        runs = {f"rate {rate}": scores(data, new, rate, seed, epochs) for rate in RATES}
        runs["random"] = rng.random(
            (data.rows("test").num_rows, data.num_items + 1)
        ).astype(np.float32)
        for name, values in runs.items():
            reached.setdefault(name, []).append(figures(values, data, new))
    columns = {
        name: list(zip(*of_seeds, strict=True)) for name, of_seeds in reached.items()
    }
    for name, of_run in columns.items():
        for figure, ours, plain in zip(
            (f"recall@{K}", "AUC"), of_run, columns[f"rate {RATES[0]}"], strict=True
        ):
            yield row(
                f"{figure}, {name}",
                ours,
                figure,
                baseline=plain,
                better="more",
                seeds=len(ours),
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, {"id-dropout": id_dropout}, turns=1, studies=["id-dropout"])
