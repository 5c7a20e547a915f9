"""Recommender sub-networks as towers, trained hybrid-parallel on TorchRec."""
