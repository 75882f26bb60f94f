"""Places of an executor's memory for what choices use beside pages: adapters, encoded audio and texts."""
