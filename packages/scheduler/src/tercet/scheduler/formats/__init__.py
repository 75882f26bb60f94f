"""Files that are neither a tokenizer.json nor weights in safetensors: recognized, refused by name, or converted."""
