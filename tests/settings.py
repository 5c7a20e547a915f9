"""as_words(), with_settings(): settings as a table of a test writes them, ``loader.batch_size=64``."""

from collections.abc import Iterable
from typing import TypeVar

from torchx_apps.config import changed

Config = TypeVar("Config")


def as_words(changes: Iterable[str]) -> list[str]:
    """The words of a command line for ``key=value`` changes; commas stand between the values of a tuple."""
    words = []
    for change in changes:
        key, _, text = change.partition("=")
        if not text or text.startswith("-"):
            words.append(f"--{change}")
        else:
            words += [f"--{key}", *text.split(",")]
    return words


def with_settings(config: Config, changes: Iterable[str]) -> Config:
    """A copy of a config with changes."""
    return changed(config, as_words(changes))
