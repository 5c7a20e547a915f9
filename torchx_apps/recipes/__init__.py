"""The built-in recipes: a recipe is a function without arguments that returns a Job, and one line in RECIPES."""

from __future__ import annotations

from collections.abc import Callable

from torchx_apps.recipes.n_tower import multi_task as multi_task
from torchx_apps.recipes.n_tower import n_tower as n_tower
from torchx_apps.recipes.n_tower import stream_job as stream_job
from torchx_apps.recipes.ncf import contextual_ncf as contextual_ncf
from torchx_apps.recipes.ncf import ncf as ncf
from torchx_apps.recipes.session import bst_job as bst_job
from torchx_apps.recipes.session import session as session
from torchx_apps.recipes.two_tower import TwoTowerConfig as TwoTowerConfig
from torchx_apps.recipes.two_tower import build_two_tower as build_two_tower
from torchx_apps.recipes.two_tower import retrieval as retrieval
from torchx_apps.recipes.two_tower import two_tower_job as two_tower_job
from torchx_apps.tasks.job import Job as Job

# By the name that `--recipe` takes and that `Job.name` is.
RECIPES: dict[str, Callable[[], Job]] = {
    "bst": bst_job,
    "contextual_ncf": contextual_ncf,
    "multi_task": multi_task,
    "n_tower": n_tower,
    "ncf": ncf,
    "retrieval": retrieval,
    "session": session,
    "stream": stream_job,
    "two_tower": two_tower_job,
}
# Users' own recipes import it by this name.
two_tower = two_tower_job
