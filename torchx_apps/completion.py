"""Print a completion script for `torchx run`: `eval "$(python -m torchx_apps.completion bash)"`, or zsh.

The script lists the components and their flags, the recipes, the keys of `--set` and the values of choices. It needs no
Python when a key is completed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torchx_apps.cli.overrides import choices, field_hint, key_paths
from torchx_apps.launch.component_help import Component, component_names, recipes_of
from torchx_apps.recipes import RECIPES
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.preprocess import PREPROCESS_RECIPES

# One function for both shells: zsh runs it under its emulation of bash's completion.
# The words are those of the line, since bash splits them at "=" and ":", and then
# replaces the last part only.
_SCRIPT = """\
_torchrec_ext_words() {
  case "$1" in
%(words)s
  esac
}
_torchrec_ext() {
  local line="${COMP_LINE:0:$COMP_POINT}" word previous="" current component="" recipe="" lead="" words=""
  current="${line##*[[:space:]]}"
  set -f
  for word in ${line%%"$current"}; do
    [ "$previous" != --recipe ] || recipe="$word"
    case "$word" in rec.*) component="$word" ;; --recipe=*) recipe="${word#*=}" ;; esac
    previous="$word"
  done
  set +f
  case "$current" in --set=* | --recipe=*) lead="${current%%%%=*}=" previous="${current%%%%=*}" ;; esac
  word="${current#"$lead"}"
  case "$previous $word" in
    "--set "*=*)
      lead="$lead${word%%%%=*}="
      words="$(_torchrec_ext_words "value ${word%%%%=*}")"
      word="${word#*=}" ;;
    "--set "*)
      # Its recipes have names of others and keys of their own.
      [ "$component" != rec.train.stream ] || recipe=""
      words="$(_torchrec_ext_words "keys ${recipe:-$component}")"
      [ -n "$words" ] || words="$(_torchrec_ext_words keys)"
      [ "$component" = rec.data.preprocess ] || words="$(_torchrec_ext_words common) $words" ;;
    "--recipe "*) words="$(_torchrec_ext_words "recipes $component")" ;;
    *" -"*) words="$(_torchrec_ext_words "flags $component")" ;;
    *) [ -n "$component" ] || words="$(_torchrec_ext_words components)" ;;
  esac
  COMPREPLY=()
  for current in $words; do
    case "$current" in "$word"*) COMPREPLY+=("$lead$current") ;; esac
  done
  if [ -n "${BASH_VERSION-}" ]; then
    lead="${line##*[[:space:]]}"
    lead="${lead%%"${lead##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$lead"}")
    case "${COMPREPLY[0]-}" in *=) compopt -o nospace 2>/dev/null ;; esac
  fi
}
%(register)s"""
_REGISTER = {
    "bash": "complete -o default -F _torchrec_ext torchx\n",
    "zsh": """\
whence compdef >/dev/null || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
complete -o default -o nospace -F _torchrec_ext torchx
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script.

    Args:
        argv: the name of the shell; the command line when None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchx_apps.completion",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("shell", choices=_REGISTER)
    shell = parser.parse_args(argv).shell
    lines = [
        f'    "{name}") echo "{" ".join(words)}" ;;'
        for name, words in completions().items()
        if words
    ]
    print(_SCRIPT % {"words": "\n".join(lines), "register": _REGISTER[shell]}, end="")
    return 0


def completions() -> dict[str, list[str]]:
    """Returns the words to choose from, by the place in the command line."""
    recipes: dict[str, Any] = {name: load_recipe(name) for name in RECIPES}
    jobs = recipes | {
        name: load_recipe(name, PREPROCESS_RECIPES) for name in PREPROCESS_RECIPES
    }
    keys = {name: _paths(job) for name, job in jobs.items()}
    # Keys that all recipes have are in the script once.
    common = set.intersection(*(set(keys[name]) for name in recipes))
    words: dict[str, list[str]] = {
        "components": component_names(),
        "common": sorted(common),
    }
    for name in words["components"]:
        parameters = Component.named(name).parameters
        words[f"flags {name}"] = [
            f"--{flag}" if len(flag) > 1 else f"-{flag}" for flag in parameters
        ] + ["--help"]
        if "set" in parameters:
            built_in = recipes_of(name)
            job = load_recipe(parameters["recipe"].default or "two_tower", built_in)
            words[f"recipes {name}"] = list(built_in)
            words[f"keys {name}"] = _others(_paths(job), common)
            words |= _values(job)
    for name, paths in keys.items():
        words[f"keys {name}"] = _others(paths, common)
    words["keys"] = _others((path for name in recipes for path in keys[name]), common)
    for job in jobs.values():
        words |= _values(job)
    return words


def _paths(job: Any) -> list[str]:
    """Returns the keys that a text can change, each with its =."""
    return [
        f"{path}=" for path in key_paths(job) if not callable(attrgetter(path)(job))
    ]


def _others(paths: Iterable[str], common: set[str]) -> list[str]:
    return sorted(set(paths) - common)


def _values(job: Any) -> Mapping[str, list[str]]:
    """Returns the values of each key with a choice."""
    values = {}
    for path in key_paths(job):
        group, _, name = path.rpartition(".")
        owner = attrgetter(group)(job) if group else job
        try:
            values[f"value {path}"] = choices(field_hint(owner, name))
        except NameError:  # a type that is imported for type checkers alone
            continue
    return values


if __name__ == "__main__":
    sys.exit(main())
