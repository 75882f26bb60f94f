"""The part of Tercet that turns token ids into text."""
