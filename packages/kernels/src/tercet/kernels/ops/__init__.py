"""One operation a file, each defined by plain torch code that every faster version must equal."""
