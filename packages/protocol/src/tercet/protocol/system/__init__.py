"""The operating system: clocks, signals, open files, private files and standard streams."""
