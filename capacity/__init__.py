"""The arithmetic of memory and pools: pure functions of numbers, free of torch and of the machine they are about."""
