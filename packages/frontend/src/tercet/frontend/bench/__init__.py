"""`tercet bench`: how fast a server answers, ours or another that speaks the OpenAI API."""
