"""EmbeddingStore: vectors by id in versions that are replaced while they are read; RedisStore: the same in a Redis."""
