"""The HTTP door: the routes that OpenAI clients call, on the same course as the gRPC door."""
