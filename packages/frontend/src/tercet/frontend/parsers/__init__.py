"""Output parsers: split a model's text into reasoning, tool calls and content while it streams."""
