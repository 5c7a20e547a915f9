"""Finds the packages; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

# `torchrec_ext.components` is the folder `components` of the clone, which no search finds under that name.
setup(
    packages=[
        *find_packages(include=["torchrec_ext", "torchrec_ext.*", "torchx_apps*"]),
        "torchrec_ext.components",
    ]
)
