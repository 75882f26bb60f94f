"""LoRA adapters by name."""
