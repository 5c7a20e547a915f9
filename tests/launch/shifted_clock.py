"""Runs torchx_apps.agent with a wrong wall clock: the first argument is by how many seconds it is ahead."""

import datetime
import sys
import time
import types

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchx_apps import agent

if __name__ == "__main__":
    shift, right = float(sys.argv.pop(1)), time.time
    time.time = lambda: right() + shift
    dynamic_rendezvous.datetime = types.SimpleNamespace(  # type: ignore[attr-defined]
        now=lambda zone: datetime.datetime.now(zone) + datetime.timedelta(seconds=shift)
    )
    sys.exit(agent.main())
