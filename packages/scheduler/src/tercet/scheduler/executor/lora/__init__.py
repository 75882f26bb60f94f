"""LoRA adapters: files, loading, and the adapters of a step."""
