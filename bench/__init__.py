"""The load generator: loads any server of the field from outside, measures what its clients feel, and says when a run cannot be trusted."""
