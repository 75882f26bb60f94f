"""KV events: changes of the prefix cache, published for cache-aware routers."""
