"""From a CSV to a service: ratings.csv in MovieLens' form, with userId, movieId, rating and timestamp in each line.

python -m torchx_apps.preprocess --recipe csv_to_service.py:job --config.path ratings.csv --out ready
python -m torchx_apps.train --recipe two_tower --data.name ready --export require --run_dir run
python -m torchx_apps.serve run/bundle
"""

from dataclasses import dataclass

from torchrec_ext.data.preprocess import Categorify, History, Preprocessor, read_csv
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob

TYPES = {"userId": "BIGINT", "movieId": "BIGINT", "timestamp": "BIGINT"}
LOG = """CREATE TABLE log AS SELECT userId AS user_id, movieId AS item_id, timestamp,
    row_number() OVER (PARTITION BY userId ORDER BY timestamp DESC) AS back FROM {}"""


@dataclass(frozen=True)
class Config:
    path: str = "ratings.csv"


def build(config, con):
    con.execute(LOG.format(read_csv(con, config.path, TYPES, broken=100)))
    history = History(user="user_id", item="item_id", time="timestamp", length=20)
    ids = [
        Categorify(column="item_id", also=("history",)),
        Categorify(column="user_id"),
    ]
    return Prepare(
        preprocessor=Preprocessor([history, *ids]),
        splits={
            "train": con.sql("FROM log WHERE back > 2"),
            "validation": con.sql("FROM log WHERE back = 2"),
            "test": con.sql("FROM log WHERE back = 1"),
        },
        events=con.sql("FROM log"),
        user="user_id",
        item="item_id",
    )


def job():
    return PreprocessJob(name="ratings", build=build, config=Config())
