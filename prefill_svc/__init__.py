"""The prefill worker: computes prompts' KV caches, holds them while decode copies, samples first tokens."""
