"""Whether a job looks up the tables of all its towers together."""

from __future__ import annotations

from torch import nn

from torchx_apps.job import Job


def merge_lookups(job: Job, model: nn.Module, world_size: int) -> None:
    """Merges the look-ups of ``model`` where ``job.lookups`` says so, before it is planned.

    ``auto`` does it where it saves exchanges and nothing stands against it: several ranks, towers on all of them, and no optimizer
    that is given to a table by the path of its tower.

    Raises:
        ValueError: ``merged`` for a model that is not made of towers.
    """
    merge = getattr(model, "merge_lookups", None)
    if merge is None:
        if job.lookups == "merged":
            raise ValueError(f"lookups=merged: {type(model).__name__} has no look-ups of several towers; leave it at auto")
        return
    by_path = any("." in exception.partition("=")[0] for exception in job.optimizer.per_table)
    helps = world_size > 1 and job.plan.towers == "data_parallel" and not by_path
    if job.lookups == "merged" or (job.lookups == "auto" and helps):
        merge()
