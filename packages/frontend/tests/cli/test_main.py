import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tercet.frontend.__about__ import __version__
from tercet.frontend.cli import main as cli
from tercet.frontend.supervisor import serve as serve_module
from tercet.frontend.supervisor.options import ConfigError, ServeConfig, parse_bytes, read_config
from tercet.frontend.supervisor.serve import require_adapter_files


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERCET_API_KEYS", raising=False)
    monkeypatch.delenv("TERCET_API_KEY", raising=False)


def parse(*arguments: str) -> ServeConfig:
    """Return the config that `tercet serve ...` would run."""
    config = cli.app(["serve", *arguments], exit_on_error=False, print_error=False)
    assert isinstance(config, ServeConfig)
    return config


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    assert parse() == ServeConfig(model="default")
    assert (parse().serve.host, parse().serve.port) == ("127.0.0.1", 30000)
    assert parse().scheduler.flags() == []


def test_options_of_the_command_line() -> None:
    config = parse(
        *("org/model", "--port", "0", "--api-key", "a", "--api-key=b", "--kv-cache-bytes", "1.5GiB"),
        *("--lora", "haiku=/a=b", "--lora=sonnet=org/s", "--max-lora-rank=16"),
        *(
            "--disable-radix-cache",
            "--page-size",
            "16",
            "--tensor-parallel-size",
            "2",
            "--scheduler.max-queue",
            "5",
            "--detokenizer.x=y",
        ),
    )
    assert config.model == "org/model"
    assert config.serve.port == 0
    assert config.frontend.api_key == ("a", "b")
    assert config.scheduler.flags() == [
        "--kv-cache-bytes=1610612736",
        "--page-size=16",
        "--disable-radix-cache",
        "--tensor-parallel-size=2",
        "--max-lora-rank=16",
    ]
    assert config.lora == {"haiku": "/a=b", "sonnet": "org/s"}
    assert config.scheduler_extra == {"max-queue": "5"}
    assert config.detokenizer_extra == {"x": "y"}


def test_a_config_file_has_a_table_per_part_and_flags_override_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tercet.toml",
        """
        [serve]
        model = "from/file"
        port = 1234
        host = "::1"
        [frontend]
        served_model_name = "mine"
        api-key = ["one", "two"]
        lora = ["haiku=/adapters/haiku", "sonnet=org/sonnet"]
        [scheduler]
        max_loras = 2
        dtype = "float32"
        disable-radix-cache = true
        kv_cache_bytes = "2GiB"
        prefill_rows = 3
        trace = true
        [detokenizer]
        max_states = 4
        """,
    )
    config = parse("--config", path, "--port", "99")
    assert (config.model, config.serve.port, config.serve.host) == ("from/file", 99, "::1")
    assert config.frontend.served_model_name == ("mine",)
    assert config.frontend.api_key == ("one", "two")
    assert config.lora == {"haiku": "/adapters/haiku", "sonnet": "org/sonnet"}
    assert config.scheduler.flags() == [
        *("--dtype=float32", "--kv-cache-bytes=2147483648", "--disable-radix-cache", "--max-loras=2")
    ]
    assert config.scheduler_extra == {"prefill-rows": "3", "trace": "true"}
    assert config.detokenizer_extra == {"max-states": "4"}
    assert parse("other/model", "--config", path).model == "other/model"


def test_the_context_can_be_made_shorter_for_less_memory() -> None:
    assert parse("--context-length", "512").scheduler.flags() == ["--context-length=512"]


def test_whoever_misses_an_option_hears_of_those_of_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--max-queued-requests", "5"]) == 2
    assert "--scheduler.NAME VALUE" in capsys.readouterr().err
    assert cli.main(["keys", "--max-queued-requests", "5"]) == 2
    assert "--scheduler" not in capsys.readouterr().err


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_API_KEYS", "one\ntwo\n")
    assert parse().frontend.api_key == ("one", "two")
    assert parse("--api-key", "three").frontend.api_key == ("three",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[serve]\nprot = 3", "'prot'"),
        ("[server]\nport = 3", "'server'"),
        ("port = 3", "'port'"),
        ("[serve]\nport = ", "Invalid value"),
        ("[scheduler]\nweird = [1]", "[scheduler] weird"),
        ("[serve]\nport = 'many'", "port"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "bad.toml", text)
    assert cli.main(["serve", "--config", path]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert path in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "many"], "--port"),
        (["--pagesize", "3"], "--pagesize"),
        (["--page-size", "0"], "--page-size"),
        (["--context-length", "0"], "--context-length"),
        (["--kv-cache-bytes", "lots"], "--kv-cache-bytes"),
        (["--kv-cache-bytes", "0"], "--kv-cache-bytes"),
        (["--startup-timeout", "nan"], "--startup-timeout"),
        (["--dp-size", "0"], "--dp-size"),
        (["--frontend-workers", "65"], "--frontend-workers"),
        (["--detokenizer-workers", "two"], "--detokenizer-workers"),
        (["--api-key", "two words"], "--api-key"),
        (["--admin-key", ""], "--admin-key"),
        (["--lora", "haiku"], "--lora"),
        (["--lora", "haiku=/a", "--lora", "haiku=/b"], "--lora"),
        (["--lora", "haiku=/a", "--max-loras", "0"], "--max-loras"),
        (["--max-loras", "-1"], "--max-loras"),
        (["--max-lora-rank", "0"], "--max-lora-rank"),
        (["--log-level", "loud"], "--log-level"),
        (["--dtype", "float8"], "--dtype must be one of auto, float32, bfloat16, float16, not 'float8'"),
        (["--task", "chat"], "--task must be one of auto, generate, embed, classify"),
        (["--load-format", "pickle"], "--load-format must be one of auto, safetensors, dummy"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype must be one of auto, bfloat16, fp8_e4m3"),
        (["--quantization", "fp8"], "--quantization must be one of none, int8, int4"),
        (["--schedule-policy", "sjf"], "--schedule-policy must be one of lpm, fcfs, priority, fair"),
        (["--tool-call-parser", "hermes2"], "--tool-call-parser must be one of auto, none, "),
        (["--reasoning-parser", ""], "--reasoning-parser must be one of auto, none, "),
        (["--shutdown-grace", "-1"], "--shutdown-grace"),
        (["--frontend.shutdown-grace", "soon"], "--shutdown-grace"),
        (["--frontend.routing-policy", "nearest"], "--routing-policy"),
        (["--frontend.keep-allive", "3"], "--keep-allive"),
        (["--frontend.keep-alive", "-1"], "--keep-alive"),
        (["--frontend.max-body-bytes", "0"], "--max-body-bytes"),
        (["--frontend.tokenizer-threads", "0"], "--tokenizer-threads"),
        (["--frontend.recovery-timeout", "nan"], "--recovery-timeout"),
        (["--chat-template", "/nowhere/mine.jinja"], "--chat-template /nowhere/mine.jinja: No such file or directory"),
        (["--frontend.api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys: No such file or directory"),
        (["--served-model-name", ""], "--served-model-name must be printable"),
        (["--served-model-name", "caf\udce9"], "--served-model-name must be printable"),
        (["--reasoning-field-name", "content"], "--reasoning-field-name cannot be 'content'"),
        (["--model", ""], "MODEL"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--frontend.port", "3"], "port"),
        (["a", "b"], "b"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_names_it(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tercet: error: ")
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5KiB", 1536), ("7", 7), (" 3 B ", 3), ("1TB", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2gib", "1e9", "2 GiB extra", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        read_config(tmp_path / "absent.toml")


def test_an_argument_too_many_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "one", "two", "three"]) == 2
    assert capsys.readouterr().err == "tercet: error: that is more than it takes: two three\n"


def test_what_keeps_the_server_from_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(_: ServeConfig) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(serve_module, "require_packages", lambda: None)
    monkeypatch.setattr(serve_module, "serve", serve)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "tercet: error: [Errno 24] Too many open files\n"


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("there", "given", "fault"),
    [
        ((), "{}/nope", "there is no such directory"),
        ((), "~/nope", "there is no such directory"),
        ((), "{}/file", "it is no directory"),
        ((), "{}", "the directory has no adapter_config.json"),
        (ADAPTER_FILES[:1], "{}", "the directory has no adapter_model.safetensors"),
        (ADAPTER_FILES[1:], "{}", "the directory has no adapter_config.json"),
        (ADAPTER_FILES[1:], "~", "the directory has no adapter_config.json"),
    ],
)
def test_an_adapter_that_is_not_there_is_refused_by_its_path(
    there: tuple[str, ...],
    given: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*there, "file"):
        (tmp_path / name).touch()
    assert cli.main(["serve", "--port", "0", "--lora", f"haiku={given.format(tmp_path)}"]) == 2
    path = given.format(tmp_path).replace("~", str(tmp_path))
    assert capsys.readouterr().err.startswith(f"tercet: error: --lora haiku={path}: {fault}")


def test_existing_and_hub_adapters_pass_the_check_of_files(tmp_path: Path) -> None:
    for name in ADAPTER_FILES:
        (tmp_path / name).touch()
    require_adapter_files({"haiku": str(tmp_path), "sonnet": "org/sonnet-lora"})


def test_what_is_opened_gets_no_streams_number_where_there_is_no_stream() -> None:
    code = (
        "import os; from tercet.frontend.cli.main import main; main(['version']); os._exit(os.open('/', os.O_RDONLY))"
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], check=False, timeout=60).returncode >= 3


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["version"], ["--version"]):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out.strip() == __version__


def test_every_option_has_its_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--port", "--served-model-name", "--kv-cache-bytes", "--config", "--api-key", "--startup-timeout"):
        assert option in text
    assert "Tokens in one page of the KV cache." in text


def test_keys_are_made_once_and_replaced_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"

    def secret() -> bytes:
        return (directory / "scheduler" / "secret").read_bytes()

    assert cli.main(["keys", str(directory)]) == 0
    first = secret()
    assert cli.main(["keys", str(directory), "--if-missing"]) == 0
    assert cli.main(["keys", str(directory)]) == 2
    assert str(directory) in capsys.readouterr().err
    assert secret() == first
    assert cli.main(["keys", str(directory), "--force"]) == 0
    assert secret() != first


def test_the_command_line_needs_nothing_heavy() -> None:
    code = "import sys, tercet.frontend.cli.main; print(*sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    modules = set(output.split())
    assert "tercet.frontend.cli.main" in modules
    assert not modules & {
        "zmq",
        "fastapi",
        "pydantic",
        "tokenizers",
        "torch",
        "uvicorn",
        "tercet.frontend.supervisor.supervisor",
    }
