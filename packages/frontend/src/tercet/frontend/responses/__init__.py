"""/v1/responses: answers as items and events, kept in a store."""
