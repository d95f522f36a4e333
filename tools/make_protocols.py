"""Make the descriptors of the gRPC protocols that the package ships, of `schema/grpc/*.proto`.

    python tools/make_protocols.py          # writes tierstore/service/rpc/protocols.binpb

Needs `grpcio-tools` (extra `dev`). What protobuf brings itself (`google/protobuf/*.proto`) is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "schema/grpc"
SHIPPED = ROOT / "tierstore/service/rpc/protocols.binpb"


def compiled() -> bytes:
    """A serialized FileDescriptorSet, each file behind those that it imports."""
    names = sorted(path.name for path in SOURCES.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "set"
        bundled = Path(protoc.__file__).parent / "_proto"
        code = protoc.main(["protoc", f"-I{SOURCES}", f"-I{bundled}", f"--descriptor_set_out={made}", *names])
        if code:
            raise SystemExit(code)
        return made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    options.out.write_bytes(compiled())
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
