"""drop_ids(): in training some ids become the out-of-vocabulary row, to train that row for unseen ids."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchrec_ext.batch import Jagged, ResumableLoader
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.data.negatives.random import device_uniform, stream
from torchrec_ext.schema import BatchSchema, RowNumbers
from torchrec_ext.schema.validation import listed


def drop_ids(
    loader: ResumableLoader,
    schema: BatchSchema,
    rates: Mapping[str, float],
    *,
    seed: int = 0,
) -> ChunkLoader:
    """Has a loader replace random ids of some features by the feature's out-of-vocabulary row, from now on.

    Without the id, the other features must carry the score, and the out-of-vocabulary row is trained beside them: an
    unseen item, looked up by that row, gets a vector from its features (DropoutNet, Volkovs et al. 2017). It has to
    happen here, in the batch: TorchRec's pipelines send ids to their shards before the model's forward runs. Take the
    training loader only.

    What is dropped is a function of (seed, epoch, number of the row, id), so it is the same on any number of ranks, at
    any batch size and after a resume. ``batch.items`` stays: in losses over the batch a dropped
    candidate is the item that was sampled, a negative of the other queries with its own log q, and only its vector is
    that of the out-of-vocabulary row.

    Args:
        loader: loader of the training batches, which is returned.
        schema: schema of the batches; a feature's ``oov_id`` is the row of dropped ids.
        rates: share of ids that are dropped, by feature, at least 0 and below 1.
        seed: seed of the choice.

    Raises:
        ValueError: a feature that the schema does not have, a rate outside 0 to 1, or another loader.

    Example::

        loader = drop_ids(training_loader(data, schema, config), schema, {"item_id": 0.2}, seed=job.train.seed)
    """
    if not isinstance(loader, ChunkLoader) or loader.sessions:
        name, rate = next(iter(rates.items()))
        what = "sessions" if isinstance(loader, ChunkLoader) else type(loader).__name__
        raise ValueError(
            f"id_dropout={name}={rate} with {what}: the items have no features to stand for a dropped id; leave "
            "id_dropout out"
        )
    rows_of_unknown = {}
    for name, rate in rates.items():
        feature = schema.feature(name)
        if feature is None:
            raise ValueError(
                f"rates names '{name}', which is no sparse feature; the features are {listed(schema.keys)}"
            )
        if not 0 <= rate < 1:
            raise ValueError(
                f"rates: {name}={rate}: must be at least 0 and below 1; 0.1 to 0.3 is usual"
            )
        rows_of_unknown[name] = feature.oov_id

    def dropped(bags: Mapping[str, Jagged], numbers: RowNumbers) -> dict[str, Jagged]:
        replaced = {}
        for name, oov_id in rows_of_unknown.items():
            values, lengths = bags[name]
            rows = numbers.shared if name in schema.shared else numbers.rows
            if lengths is not None:
                rows = rows.repeat_interleave(lengths, output_size=len(values))
            # A stream for each feature, so that one is dropped whether or not another
            # is.
            key = stream(seed, loader.epoch, *name.encode())
            drawn = device_uniform(key, rows, values)
            replaced[name] = bags[name]._replace(
                values=torch.where(drawn < rates[name], oov_id, values)
            )
        return replaced

    loader.hook.replace = dropped
    return loader
