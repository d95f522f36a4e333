"""The gRPC front of the service (extra `grpc`): the Open Inference Protocol's service, health and reflection."""

import os

# grpcio's core has two ways to read connections. With the older one, whoever waits for the next event reads them himself,
# instead of being told by threads of the core: a third less processor time a call (docs/decisions/grpc.md). Read when the
# core is first used in a process; who has set it knows better.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
