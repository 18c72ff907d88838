"""pdxfer: moves the caches of one LLM request from a prefill worker to a decode worker, whole or not at all."""
