"""Moving a sequence's blocks between two KV caches: one small interface, one file per transport, and the hand-over that checks what arrived."""
