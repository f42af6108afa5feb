"""A library that turns token ids into token ids; it knows no gRPC, no environment variable and no service."""
