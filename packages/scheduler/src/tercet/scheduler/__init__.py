"""The scheduling and model-execution part of Tercet."""
