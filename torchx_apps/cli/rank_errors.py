"""RankErrorHandler: torchrun's handler of a rank's error, which writes it in our words."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from torchx_apps.cli.errors import record_error


class RankErrorHandler(ErrorHandler):
    """Writes this rank's error, in the words of `describe_error`, to the file where torchrun looks for it."""

    def record_exception(self, e: BaseException) -> None:
        """Writes the reply file that torchrun named; does nothing where it named none."""
        record_error(e)
