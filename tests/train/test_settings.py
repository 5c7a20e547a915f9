"""Settings of a training that cannot be are refused by their name and value, before torch is asked."""

from collections.abc import Callable

import pytest

from torchrec_ext.train.config import EarlyStop, Schedule, TrainConfig


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TrainConfig(epochs=0), "epochs=0: must be 1 or more"),
        (lambda: EarlyStop(mode="up"), "mode='up': must be "),  # type: ignore[arg-type]
        (lambda: EarlyStop(patience=0), "patience=0: must be 1 or more"),
        (lambda: Schedule(kind="cosin"), "kind='cosin': must be one of constant"),  # type: ignore[arg-type]
        (lambda: Schedule(warmup=-1), "warmup=-1: must be 0 or more"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    make: Callable[[], object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        make()
