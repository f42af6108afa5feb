"""The `tandem` command: starts the services, imports models, talks to a gateway."""
