"""RankErrorHandler: writes a rank's error in our words; a file of its own, because it imports torch."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from torchx_apps.cli.errors import record_error


class RankErrorHandler(ErrorHandler):
    """Writes this rank's error, in the words of `describe_error`, to torchrun's error file."""

    def record_exception(self, e: BaseException) -> None:
        """Writes the reply file named by torchrun; does nothing if none is named."""
        record_error(e)
