"""DynamicIdLoader: gives the raw ids of a loader's batches rows, before a pipeline sends ids to their shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.batch import Fresh, Jagged, ResumableLoader, TowerBatch
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.ids import Dynamic, DynamicIds
from torchrec_ext.ids.dynamic import Engine
from torchrec_ext.ids.policy import IdsChangedError
from torchrec_ext.schema import BatchSchema, IdHook, RowNumbers
from torchrec_ext.schema.validation import listed


class DynamicIdLoader:
    """Wraps a training loader of raw ids: its batches hold rows, and notes about rows that begin anew.

    Ids become rows in the columns of a batch, before it is laid out: the loader has a ``hook`` (:class:`IdHook`), and
    builds no batch ahead. Features that share a table share its ids, such as a user's history and the candidate.

    :func:`train` applies the notes; a loop of one's own does so by
    :class:`torchrec_ext.train.step.fresh_rows.FreshRows`. Every rank has a loader, all ranks iterate together, and each
    step of theirs exchanges the new ids.

    Args:
        loader: loader of the training batches, made with ``schema``.
        schema: schema of the batches, from ``schema.with_dynamic(features)``.
        features: settings by feature; one of those that share a table stands for all of them.
        every: steps between two admissions, see :class:`DynamicIds`.
        raw_ids: by feature the raw id of each of the loader's own ids, (V,) int64, if these are rows of a vocabulary;
            ``batch.items`` stay rows of the vocabulary.

    Attributes:
        ids: the ids of the tables, by the feature that stands for them.
        features: the features of each set of ids, likewise.
        tables: the tables of each set of ids, likewise.

    Raises:
        ValueError: a loader without a hook, a feature that the schema does not have or check, two of one table, or a
            table of other than ``capacity`` rows.

    Example::

        schema = model.schema().with_dynamic(["item_id"])
        loader = ChunkLoader(log, schema, config=LoaderConfig(batch_size=4096))
        loader = DynamicIdLoader(loader, schema, {"item_id": Dynamic(capacity=1_000_000, admit_after=2)})
    """

    def __init__(
        self,
        loader: ResumableLoader,
        schema: BatchSchema,
        features: Mapping[str, Dynamic],
        *,
        every: int = 1,
        raw_ids: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._loader = loader
        self.tables = {
            name: _tables(schema, name, policy) for name, policy in features.items()
        }
        self.features: dict[str, list[str]] = {name: [] for name in features}
        for feature in schema.sparse:
            spaces = [
                name
                for name, tables in self.tables.items()
                if not tables.isdisjoint(feature.tables)
            ]
            if len(spaces) > 1:
                raise ValueError(
                    f"features '{spaces[0]}' and '{spaces[1]}' share table {feature.readers}, whose rows belong to one "
                    "set of ids; give settings for one of them"
                )
            for space in spaces:
                self.features[space].append(feature.name)
        self._raw_ids = dict(raw_ids or {})
        self.ids = DynamicIds(features, every=every)
        self._fresh: tuple[Fresh, ...] = ()
        hook = getattr(loader, "hook", None)
        if not isinstance(hook, IdHook):
            raise ValueError(
                f"{type(loader).__name__} has no hook, where ids become rows; set `schema, self.hook = "
                "schema.with_hook()` in it, and build its batches by this schema"
            )
        hook.replace = self._step
        # An id has its row from its batch on, so no batch may be built ahead.
        if isinstance(loader, ChunkLoader):
            loader.depth = 0
        # Look-ups of this rank at the last figures, and those among them that read row
        # 0.
        self._reported = torch.zeros(2, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[TowerBatch]:
        for batch in self._loader:
            yield dataclasses.replace(batch, fresh=self._fresh)

    def _step(
        self, bags: Mapping[str, Jagged], numbers: RowNumbers
    ) -> dict[str, Jagged]:
        """See :class:`IdHook`; admits ids."""
        del numbers
        # One call for all features: on several ranks each call is an exchange.
        rows, notes = self.ids.step(self._joined(bags))
        fresh = []
        for note in notes:
            # Sorted: a set of names has another order in each process.
            for table in sorted(self.tables[note.table]):
                fresh.append(note._replace(table=table))
        self._fresh = tuple(fresh)
        return self._split(bags, rows)

    def compile_look_ups(self, engine: Engine) -> None:
        """Has look-ups compiled, as a training with captured steps does; see :meth:`DynamicIds.compile_look_ups`."""
        self.ids.compile_look_ups(engine)

    def rows(
        self, bags: Mapping[str, Jagged], numbers: RowNumbers
    ) -> dict[str, Jagged]:
        """Replaces ids by the rows that they have now, for an evaluation; changes nothing. See :class:`IdHook`."""
        del numbers
        return self._split(bags, self.ids.rows(self._joined(bags)))

    def _joined(self, bags: Mapping[str, Jagged]) -> dict[str, Tensor]:
        """Returns the raw ids of each set of ids, feature by feature."""
        raw = {}
        for space, names in self.features.items():
            values = []
            for name in names:
                ids = bags[name].values
                of_vocabulary = self._raw_ids.get(name)
                if of_vocabulary is not None:
                    ids = of_vocabulary.index_select(0, ids)
                values.append(ids)
            raw[space] = torch.cat(values)
        return raw

    def _split(
        self, bags: Mapping[str, Jagged], rows: Mapping[str, Tensor]
    ) -> dict[str, Jagged]:
        """Returns the bags of each feature with its part of the rows."""
        replaced = {}
        for space, names in self.features.items():
            sizes = [len(bags[name].values) for name in names]
            parts = torch.split(rows[space], sizes)
            for name, part in zip(names, parts, strict=True):
                replaced[name] = bags[name]._replace(values=part)
        return replaced

    def figures(self) -> dict[str, float]:
        """Returns :meth:`DynamicIds.figures` as floats; collective.

        ``ids_unknown`` is the share of the look-ups of all ranks since the last call that read row 0.
        """
        lookups, unknown = self._recent()
        self._reported = self._counts()
        figures = {name: float(value) for name, value in self.ids.figures().items()}
        figures["ids_unknown"] = unknown / max(1, lookups)
        return figures

    def _counts(self) -> Tensor:
        counts = self.ids.counts
        return torch.tensor([counts["lookups"], counts["unknown"]])

    def _recent(self) -> list[int]:
        """Returns the look-ups of all ranks since the last figures, and those that read row 0; collective."""
        return self.ids.ranks.reduced(self._counts() - self._reported).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self._loader.set_epoch(epoch)

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the state of the wrapped loader, and the ids as they are now; all ranks call it.

        No batch may be under way: an id that the next batch has admitted already would not be fresh after a resume.
        """
        return {
            "loader": self._loader.state_dict(step=step),
            "ids": self.ids.state_dict(),
            "recent": self._recent(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the saved position with the saved ids, on any number of ranks.

        The ids come first: a loader of other rows, such as the next day's, refuses its position, and they stay.

        Raises:
            IdsChangedError: see :meth:`load_ids`.
        """
        self.load_ids(state)
        # One rank has the look-ups of all since the last figures.
        if self.ids.ranks.is_first:
            self._reported -= torch.tensor(state["recent"])
        self._loader.load_state_dict(state["loader"])

    def load_ids(self, state: Mapping[str, Any]) -> None:
        """Continues with the saved ids, from the first row of this loader.

        Raises:
            IdsChangedError: the state has no ids, or those of other tables.
        """
        if "ids" not in state:
            raise IdsChangedError(
                "it was trained without dynamic ids, and its rows are no such ids'; begin a new run without start.path"
            )
        try:
            self.ids.load_state_dict(state["ids"])
        except ValueError as error:
            raise IdsChangedError(str(error)) from None
        self._reported = self._counts()


def _tables(schema: BatchSchema, name: str, policy: Dynamic) -> set[str]:
    """Returns the tables of a feature and of those that share one with it."""
    feature = schema.feature(name)
    if feature is None:
        raise ValueError(
            f"'{name}' is no sparse feature of the schema; the features are {listed(schema.keys)}"
        )
    if not feature.dynamic:
        raise ValueError(
            f"feature '{name}': the schema checks its ids; make it by schema.with_dynamic(['{name}'])"
        )
    if policy.capacity != feature.num_embeddings:
        raise ValueError(
            f"feature '{name}': capacity={policy.capacity:,}, but table {feature.readers} has "
            f"{feature.num_embeddings:,} rows; give both one number"
        )
    tables = set(feature.tables)
    for other in schema.sparse:
        if not tables.isdisjoint(other.tables):
            tables.update(other.tables)
    return tables
