"""Structured output, the half that checks: what an answer must look like, translated, and compiled once on trial."""
