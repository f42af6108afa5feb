"""What every server, channel and service process does alike: options, health, drain, errors to status, settings, signals."""
