"""Settings of a training that cannot be are refused by their name and value, before torch is asked."""

import math
from collections.abc import Callable

import pytest

from torchrec_ext.train.config import EarlyStop, Schedule, TrainConfig


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TrainConfig(epochs=0), "epochs=0: must be 1 or more"),
        (lambda: EarlyStop(mode="up"), "mode='up': must be "),  # type: ignore[arg-type]
        (lambda: EarlyStop(min_delta=math.nan), "min_delta=nan: must be "),
        (lambda: Schedule(kind="cosin"), "kind='cosin': must be one of constant"),  # type: ignore[arg-type]
        (lambda: Schedule(floor=1.5), "floor=1.5: must be between 0 and 1"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    make: Callable[[], object], told: str
) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert told in str(error.value)
