"""GGUF files: llama.cpp's format of a whole model, with its config, tokenizer and tensors in one file."""
