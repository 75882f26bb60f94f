"""Vision towers: pictures to embeddings."""
