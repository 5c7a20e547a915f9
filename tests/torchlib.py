"""keep(): one table of ONNX functions for all exports of a process; torch builds it anew, .5 s, for each."""

import functools


@functools.cache
def keep() -> None:
    """Lets torch's exporter take the table of the first export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    build = functools.cache(ONNXRegistry.from_torchlib)
    ONNXRegistry.from_torchlib = staticmethod(build)  # type: ignore[method-assign, assignment]
