"""The public door: text outside, tokens inside. It imports no torch, no transformers and no engine."""
