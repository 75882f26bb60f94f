"""One file for each notation that models write tool calls in."""
