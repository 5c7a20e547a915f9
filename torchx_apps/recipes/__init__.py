"""Built-in recipes: every public function here that returns a Job is one, by its own name."""

from __future__ import annotations

from torchx_apps.recipes.n_tower import n_tower as n_tower
from torchx_apps.recipes.ncf import contextual_ncf as contextual_ncf
from torchx_apps.recipes.ncf import ncf as ncf
from torchx_apps.recipes.session import session as session
from torchx_apps.recipes.two_tower import TwoTowerConfig as TwoTowerConfig
from torchx_apps.recipes.two_tower import build_two_tower as build_two_tower
from torchx_apps.recipes.two_tower import retrieval as retrieval
from torchx_apps.recipes.two_tower import two_tower as two_tower
from torchx_apps.tasks.job import Job as Job
