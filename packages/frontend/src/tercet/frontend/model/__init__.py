"""Files of the served model: tokenizer, chat template, prompt encoding."""
