"""NEGATIVES: the samplers that ``loader.sampling`` can name, in the order in which messages list them."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec_ext.data.negatives.hard import HardNegatives
from torchrec_ext.data.negatives.mixed import MixedCandidates
from torchrec_ext.data.negatives.samplers import PopularityNegatives, TrainingSampler, UniformNegatives

NEGATIVES: Mapping[str, type[TrainingSampler]] = {
    "uniform": UniformNegatives,
    "popularity": PopularityNegatives,
    "hard": HardNegatives,
    "mixed": MixedCandidates,
}
