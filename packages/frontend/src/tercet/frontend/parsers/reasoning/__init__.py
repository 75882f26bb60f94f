"""One file for each notation that models set reasoning apart with."""
