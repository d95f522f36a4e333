"""The service: a data plane that knows no transport, and the transports."""
