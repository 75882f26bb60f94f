"""OpenAI's Responses and Conversations APIs."""
