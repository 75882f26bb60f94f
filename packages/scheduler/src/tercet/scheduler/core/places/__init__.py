"""Places of an executor's memory for what choices use beside pages: adapters and encoded audio."""
