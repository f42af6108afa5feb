"""The decode worker: reserves blocks, has prompts computed, and generates tokens."""
