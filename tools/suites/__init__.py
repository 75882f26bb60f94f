"""Suites of other projects, and of published files, run against Tercet: one module, one command each."""
