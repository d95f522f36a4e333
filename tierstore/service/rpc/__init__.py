"""The gRPC transport (extra `grpc`): the protocols of the data plane over it, health and reflection."""

import os

# grpcio's core has two ways to read connections. With the older one, the thread that waits for the next event reads them
# itself, without threads of the core: a third less processor time a call (docs/decisions/grpc.md). The variable is read
# when the core is first used in a process; a value that is set already stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
