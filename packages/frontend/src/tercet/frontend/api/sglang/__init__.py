"""SGLang's native API: generate, tokenize, sessions, adapters and control."""
