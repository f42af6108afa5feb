"""OpenTelemetry and Prometheus set-up; every span and metric name in one place. Imports nothing of ours."""
