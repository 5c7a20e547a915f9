"""Sharding plans: made by TorchRec's planner, explained, and forecast for clusters one does not have."""
