"""The detokenizer process: turns token ids into text."""
