"""Top-k search over stored vectors: exact, and approximate by FAISS."""
