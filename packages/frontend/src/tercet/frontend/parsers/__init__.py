"""What a model's text means: reasoning, tool calls and words for the reader, told apart as the text arrives."""
