"""Vision towers: images to embeddings."""
