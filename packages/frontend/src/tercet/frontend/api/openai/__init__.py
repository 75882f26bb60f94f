"""OpenAI's Chat Completions, Completions, Embeddings and rerank APIs."""
