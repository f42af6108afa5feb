"""What prefill and decode workers do alike: engine settings, load and memory reports, statuses of engine errors, a worker's life as a process."""
