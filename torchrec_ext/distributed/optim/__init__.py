"""Optimizers of tables and dense layers, for replicated and for sharded parameters."""
