"""/v1/conversations: items that are kept together, for responses to go on with."""
