"""Messages between processes, their values and their encoding."""
