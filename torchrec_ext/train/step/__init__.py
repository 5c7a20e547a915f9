"""One training step, in the fastest form for its device and ranks: pipelined, plain or captured."""
