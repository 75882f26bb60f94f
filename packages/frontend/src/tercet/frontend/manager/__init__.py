"""`TokenizerManager`: tokenizes requests, holds their state and returns their output."""
