"""Compiler of the gRPC schema: `python -m tools.grpc_schema` writes sglang_scheduler.binpb beside the .proto file."""

from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc

FOLDER = Path(__file__).parents[1] / "packages/frontend/src/tercet/frontend/grpc"


def compiled() -> bytes:
    """Return the set of descriptors of the schema and its imports."""
    with as_file(files("grpc_tools") / "_proto") as builtin, TemporaryDirectory() as directory:
        target = Path(directory) / "set"
        options = [f"--proto_path={FOLDER}", f"--proto_path={builtin}", "--include_imports"]
        if protoc.main(["protoc", *options, f"--descriptor_set_out={target}", "sglang_scheduler.proto"]):
            raise ValueError("sglang_scheduler.proto is not valid")
        return target.read_bytes()


if __name__ == "__main__":
    (FOLDER / "sglang_scheduler.binpb").write_bytes(compiled())
