"""The reader of SGLang's options and endpoints, on a small package in its manner."""

from pathlib import Path

import pytest

from tercet.frontend.cli.launch_server.translation import ServerArg
from tools.sglang_names import endpoints, server_args

FIELDS = """
class Some(msgspec.Struct):
    derived = Derived(fn="x")
    model_path: A[str, Arg(help="The model.", aliases=["--model"])]
    tp_size: A[int, Arg(help="h", aliases=["--tensor-parallel-size"])] = 1
    fraction: A[Optional[float], "A share."] = None
    enable_x: A[bool, "A flag."] = False
    y_on: A[Optional[bool], Arg(action=argparse.BooleanOptionalAction)] = None
    buckets: A[Optional[List[float]], "Many."] = None
    as_json: A[List[str], Arg(type_parser=json_list_type)] = msgspec.field(default_factory=list)
    lora_paths: A[str, Arg(action=LoRAPathAction, action_kwargs={"type": str, "nargs": "*"})] = None
    checksum: A[Optional[str], Arg(nargs="?", const="")] = None
    renamed: A[str, Arg(cli_name="--other-name")] = "auto"
    hidden: A[bool, Arg(no_cli=True)] = False
    plain: int = 3
"""
PARSER = """
def add_cli_args(parser):
    parser.add_argument("--config", type=str, help="A file.")
    parser.add_argument("--old", action=DeprecatedStoreTrueAction, new_flag="--new")
    parser.add_argument("--older", action="store_true")
    parser.add_argument("--tp-size", type=int)
"""

SERVER = """
@app.get("/health")
@app.get("/health_generate")
async def health(): ...

@app.api_route("/generate", methods=["POST", "PUT"], response_class=X)
async def generate(): ...

def launch(): app.add_middleware(A)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    fields = tmp_path / "srt/arg_groups/fields"
    fields.mkdir(parents=True)
    (fields / "exec_.py").write_text(FIELDS)
    (tmp_path / "srt/server_args.py").write_text(PARSER)
    served = tmp_path / "srt/entrypoints"
    served.mkdir()
    for name in ("http_server.py", "elastic_ep.py"):
        (served / name).write_text(SERVER if name == "http_server.py" else "")
    (served / "v1_loads.py").write_text('@router.get("/v1/loads")\nasync def loads(): ...\n')
    return tmp_path


def test_the_options_of_fields_and_of_the_parser_are_found(package: Path) -> None:
    assert server_args(package) == [
        ServerArg("exec", ("--model-path", "--model"), "value", ""),
        ServerArg("exec", ("--tp-size", "--tensor-parallel-size"), "value", "1"),
        ServerArg("exec", ("--fraction",), "value", ""),
        ServerArg("exec", ("--enable-x",), "flag", ""),
        ServerArg("exec", ("--y-on", "--no-y-on"), "flag", ""),
        ServerArg("exec", ("--buckets",), "values", ""),
        ServerArg("exec", ("--as-json",), "value", ""),
        ServerArg("exec", ("--lora-paths",), "values", ""),
        ServerArg("exec", ("--checksum",), "optional", ""),
        ServerArg("exec", ("--other-name",), "value", "auto"),
        ServerArg("server_args", ("--config",), "value", ""),
        ServerArg("server_args", ("--old",), "flag", ""),
        ServerArg("server_args", ("--older",), "flag", ""),
    ]


def test_the_endpoints_are_found(package: Path) -> None:
    found = [("GET", "/health"), ("GET", "/health_generate"), ("POST", "/generate"), ("PUT", "/generate")]
    assert endpoints(package) == [*found, ("GET", "/v1/loads")]


def test_a_directory_without_options_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"server_args\.py"):
        server_args(tmp_path)
