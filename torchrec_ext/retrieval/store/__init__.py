"""EmbeddingStore: vectors by id in versions that are replaced while they are read; RedisStore: vectors in a Redis."""
