"""Sharding plans: made by TorchRec's planner, explained, and foreseen for clusters one does not have."""
