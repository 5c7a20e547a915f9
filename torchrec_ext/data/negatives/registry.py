"""NEGATIVES: the samplers that ``loader.sampling`` can name, in the order in which messages list them.

A line gives a class's place, and its attributes that differ from those of :class:`TrainingSampler`: the checks of
LoaderConfig read them, without torch.
"""

from __future__ import annotations

from torchrec_ext.exports import Registry, entry

NEGATIVES = Registry(
    {
        "uniform": entry("torchrec_ext.data.negatives.samplers:UniformNegatives"),
        "popularity": entry("torchrec_ext.data.negatives.samplers:PopularityNegatives"),
        "hard": entry(
            "torchrec_ext.data.negatives.hard:HardNegatives",
            refreshed=True,
            host_only="the model ranks items",
        ),
        "mixed": entry(
            "torchrec_ext.data.negatives.mixed:MixedCandidates",
            shared=True,
            host_only="candidates are drawn",
        ),
    },
    shared=False,
    refreshed=False,
    host_only=None,
)
