"""`tercet bench`: a load generator for servers with the OpenAI API."""
