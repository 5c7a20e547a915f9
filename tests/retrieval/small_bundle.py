"""A bundle of a small model over a catalogue with ids unlike its rows, and the whole model beside it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.examples import ITEMS, USERS, small_model
from torchrec_ext.models.tower_model import Interaction
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.schema import Jagged

FIRST_ITEM = 1_000  # ids of items: 1000 + position; item row = position + 1
FIRST_USER = 1  # ids of users are rows of their table; row 0 is the unknown user
GENRES = ("Comedy", "Drama", "War")


class SmallBundle:
    """A bundle in ``folder``, and the model that it was made of.

    Item p has the features of row p + 1 of the tables, and the genre p % 3,
    the year 1990 + (p + 1) // 10 and the studio "s" and p + 1. User u has taken the items at u % 49 and (u
    + 5) % 49.
    """

    def __init__(
        self,
        folder: Path,
        *,
        interaction: Interaction = "top_nn",
        seed: int = 0,
        users: bool = True,
        **settings: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.folder = folder
        self.model = (
            small_model(torch.device("cpu"), interaction, seed)
            .eval()
            .requires_grad_(False)
        )
        for table in (
            module
            for module in self.model.modules()
            if isinstance(module, torch.nn.EmbeddingBag)
        ):
            # far enough apart to be ranked alike by any sum
            torch.nn.init.normal_(table.weight)
        ids = np.arange(USERS)
        self.ages = (ids / USERS).astype(np.float32)
        self.histories = [
            [] if user == 0 else [1 + user % 7, 1 + user % 11] for user in ids.tolist()
        ]
        export(
            self.model,
            folder,
            catalogue=self._catalogue(),
            users=self._users() if users else None,
            queries=self._features(ids),
            **settings,
        )

    @cached_property
    def bundle(self) -> Bundle:
        return Bundle.load(self.folder)

    def _catalogue(self) -> Catalogue:
        rows = np.arange(1, ITEMS)
        return Catalogue(
            ids=rows - 1 + FIRST_ITEM,
            features=pa.table({"item_id": rows, "price": self._prices(rows)}),
            titles=[f"Item <b>{row - 1}</b>" for row in rows.tolist()],
            categories=[[GENRES[(row - 1) % 3]] for row in rows.tolist()],
            attributes=pa.table(
                {
                    "year": 1990 + rows // 10,
                    "studio": [f"s{row}" for row in rows.tolist()],
                }
            ),
            trained=rows - 1 + FIRST_ITEM,
        )

    def _features(self, ids: NDArray[np.int64]) -> pa.Table:
        histories = pa.array(
            [self.histories[user] for user in ids.tolist()], type=pa.list_(pa.int64())
        )
        return pa.table({"user_id": ids, "age": self.ages[ids], "history": histories})

    def _users(self) -> NamedUsers:
        ids = np.arange(FIRST_USER, USERS)
        taken = [[user % 49, (user + 5) % 49] for user in ids.tolist()]
        return NamedUsers(
            key="user_id",
            ids=ids,
            features=self._features(ids),
            unknown={"user_id": 0, "age": 0.0, "history": []},
            seen=pa.array(taken, type=pa.list_(pa.int64())),
            liked=pa.array([pair[::-1] for pair in taken], type=pa.list_(pa.int64())),
        )

    @staticmethod
    def _prices(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return (rows / ITEMS).astype(np.float32)

    def logits(self, users: NDArray[np.int64], items: NDArray[np.int64]) -> Tensor:
        """(N,) of the whole model, in one batch, on pairs of a user id and an item id."""
        rows = items - FIRST_ITEM + 1
        histories = [self.histories[user] for user in users.tolist()]
        lengths = torch.tensor([len(history) for history in histories])
        batch = self.model.schema().assemble(
            {
                "user_id": Jagged(torch.from_numpy(users)),
                "history": Jagged(
                    torch.tensor([item for history in histories for item in history]),
                    lengths,
                ),
                "item_id": Jagged(torch.from_numpy(rows)),
            },
            {
                "age": torch.from_numpy(self.ages[users]),
                "price": torch.from_numpy(self._prices(rows)),
            },
            labels=torch.zeros(len(users)),
        )
        return self.model.logits(batch)
