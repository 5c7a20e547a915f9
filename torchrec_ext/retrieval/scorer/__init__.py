"""Scorer: from a request to recommendations, scores or vectors, in one process."""
