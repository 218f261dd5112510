"""Write gateway/http/tinker_pb2.py and .pyi from tinker.proto; with --check, say whether they are stale.

Generated code refuses a protobuf runtime older than the compiler it came from, so the compiler sets the lower bound in
pyproject.toml. Writing is refused with one newer than OLDEST_RUNTIME: install `grpcio-tools==1.73.1` for it. Checking
works with any compiler, since it compares the descriptor the module registers with the one the proto file gives.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

OLDEST_RUNTIME = (6, 31)
HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "gateway" / "http"


def compiled_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """What the proto file says now."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "descriptor.bin"
        _run(f"--descriptor_set_out={output}")
        return descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file[0]


def committed_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """What the generated module says."""
    from gateway.http import tinker_pb2

    return descriptor_pb2.FileDescriptorProto.FromString(tinker_pb2.DESCRIPTOR.serialized_pb)


def is_stale() -> bool:
    # json_name is filled in by the compiler in one of the two forms only.
    compiled, committed = compiled_descriptor(), committed_descriptor()
    for descriptor in (compiled, committed):
        for message in descriptor.message_type:
            _clear_json_names(message)
    return compiled != committed


def _clear_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _clear_json_names(nested)


def write() -> None:
    with tempfile.TemporaryDirectory() as directory:
        _run(f"--python_out={directory}", f"--pyi_out={directory}")
        module = (Path(directory) / "tinker_pb2.py").read_text()
        found = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", module)
        if found is None or tuple(map(int, found.groups())) > OLDEST_RUNTIME:
            sys.exit(f"this compiler makes code for a protobuf newer than {OLDEST_RUNTIME}: use grpcio-tools==1.73.1")
        (TARGET / "tinker_pb2.py").write_text(module)
        (TARGET / "tinker_pb2.pyi").write_text((Path(directory) / "tinker_pb2.pyi").read_text())


def _run(*options: str) -> None:
    if protoc.main(["protoc", f"-I{HERE}", *options, str(HERE / "tinker.proto")]) != 0:
        sys.exit("protoc failed")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit("gateway/http/tinker_pb2.py is stale: run python -m openapi.generate" if is_stale() else 0)
    write()
