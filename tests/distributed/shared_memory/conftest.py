"""The compiled library: tests of shared memory are skipped, with the reason, where it is not built."""

import pytest

from torchrec_ext.distributed.shared_memory import library


def missing() -> str:
    try:
        library.load()
    except library.LibraryError as error:
        return f"the library of shared memory: {error}"
    return ""


needs_library = pytest.mark.skipif(bool(missing()), reason=missing())
