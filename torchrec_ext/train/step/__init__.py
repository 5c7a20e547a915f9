"""One training step, in the way that is fastest where it runs: pipelined, plain or captured."""
