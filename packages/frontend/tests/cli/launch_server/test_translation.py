"""SGLang's command lines as those of `tercet serve`."""

from pathlib import Path

import pytest

from tercet.frontend.cli import main as cli
from tercet.frontend.cli.launch_server.aliases import ALIASES, GROUPS, IGNORED, INSTEAD
from tercet.frontend.cli.launch_server.translation import server_args, translate
from tercet.frontend.supervisor.options import ConfigError, ServeConfig

NAMES = [name for arg in server_args() for name in arg.names]


def parse(command: str) -> ServeConfig:
    """Return the config that `tercet launch_server ...` would run."""
    config = cli.app(["launch_server", *command.split()], exit_on_error=False, print_error=False)
    assert isinstance(config, ServeConfig)
    return config


def serve(command: str) -> ServeConfig:
    config = cli.app(["serve", *command.split()], exit_on_error=False, print_error=False)
    assert isinstance(config, ServeConfig)
    return config


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--model-path org/model --host :: --port 1", "org/model --host :: --port 1"),
        ("--model org/model", "org/model"),
        ("--tp 2 --dp 3", "--tensor-parallel-size 2 --dp-size 3"),
        ("--tp 2 --dp 2 --enable-dp-attention", "--tensor-parallel-size 2 --dp-size 2 --enable-dp-attention"),
        ("--tp-size=2 --data-parallel-size=3", "--tensor-parallel-size 2 --dp-size 3"),
        ("--mem-fraction-static 0.8 --max-total-tokens 4Ki", "--mem-fraction-static 0.8 --max-total-tokens 4096"),
        ("--context-length 25.6k", "--context-length 25600"),
        ("--max-prefill-tokens 100", "--chunked-prefill-size 100"),
        ("--max-prefill-tokens 100 --chunked-prefill-size 50", "--chunked-prefill-size 50"),
        ("--chunked-prefill-size 50 --max-prefill-tokens 100", "--chunked-prefill-size 50"),
        ("--chunked-prefill-size -1", ""),
        ("--lora-paths a=/x /y m --max-lora-rank 8", "--lora a=/x --lora /y=/y --lora m=m --max-lora-rank 8"),
        ("--enable-lora", "--max-loras 8"),
        ("--max-loras-per-batch 4 --enable-lora", "--max-loras 4"),
        ("--api-key a --api-key b --admin-api-key c", "--api-key b --admin-key c"),
        ("--is-embedding --dtype half", "--task embed --dtype float16"),
        ("--load-format gguf --kv-cache-dtype bf16", "--load-format auto --kv-cache-dtype bfloat16"),
        ("--disable-radix-cache --schedule-policy fcfs", "--disable-radix-cache --schedule-policy fcfs"),
        ("--enable-priority-scheduling", "--schedule-policy priority"),
        ("--disable-overlap-schedule --device cuda", "--scheduler.overlap 0 --scheduler.device cuda"),
        ("--grammar-backend xgrammar", "--scheduler.grammar-backend xgrammar"),
        ("--tool-call-parser qwen25", "--tool-call-parser hermes"),
        ("--reasoning-parser deepseek-r1", "--reasoning-parser deepseek_r1"),
        ("--load-balance-method round_robin", "--frontend.routing-policy round_robin"),
        ("--load-balance-method auto", "--frontend.routing-policy cache_aware"),
        ("--tokenizer-worker-num 2 --detokenizer-worker-num 3", "--frontend-workers 2 --detokenizer-workers 3"),
        ("--log-requests --log-requests-level 2", "--log-requests --log-requests-level 2"),
        ("--log-requests-format json", "--log-format json"),
        ("--log-level INFO --served-model-name mine", "--log-level info --served-model-name mine"),
        ("--allowed-media-domains a.org b.org", "--allowed-media-host a.org --allowed-media-host b.org"),
        ("--threads 3 --scheduler.max-queue 5", "--threads 3 --scheduler.max-queue 5"),
        ("--model-path m --tokenizer-path m", "m"),
        ("--dcp-size 1 --schedule-conservativeness 1 --disaggregation-mode null", ""),
        ("--tp 2 --node-rank 1 --dist-init-addr a:5", "--tp 2 --node-rank 1 --dist-init-addr a:5"),
        ("--pp-size 2", "--pipeline-parallel-size 2"),
        ("--tp 4 --ep-size 2", "--tensor-parallel-size 4 --expert-parallel-size 2"),
        ("--init-expert-location trivial --ep-num-redundant-experts 0", "--scheduler.ep-num-redundant-experts 0"),
        (
            "--init-expert-location /l.json --ep-num-redundant-experts 2",
            "--scheduler.init-expert-location /l.json --scheduler.ep-num-redundant-experts 2",
        ),
        ("--nccl-init-addr a:5 --nnodes 2", "--dist-init-addr a:5 --nnodes 2"),
    ],
)  # fmt: skip
def test_a_command_of_sglang_is_one_of_ours(theirs: str, ours: str) -> None:
    assert parse(theirs) == serve(ours)


def test_an_adapter_may_be_an_object() -> None:
    adapter = '{"lora_name": "a", "lora_path": "/x", "pinned": true}'
    assert translate(["--lora-paths", adapter]).arguments == ["--lora=a=/x"]
    with pytest.raises(ConfigError, match="an object needs a lora_name"):
        translate(["--lora-paths", "{}"])


def test_a_template_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert parse(f"--chat-template {path}").frontend.chat_template == path
    with pytest.raises(ConfigError, match="--chat-template chatml: there is no such file"):
        parse("--chat-template chatml")


@pytest.mark.parametrize("name", IGNORED)
def test_an_option_without_effect_leaves_a_note(name: str) -> None:
    arg = next(arg for arg in server_args() if name in arg.names)
    arguments, [note] = translate([name] if arg.takes == "flag" else [name, "7"])
    assert arguments == []
    assert note.startswith(f"{name} has no effect: ")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("--trust-remote-code", "--trust-remote-code is an option of SGLang that .*never runs code"),
        ("--dcp-size 2", "--dcp-size is an option .*use --tensor-parallel-size"),
        ("--tokenizer-path other --model-path m", "--tokenizer-path is an option .*model's directory"),
        ("--disaggregation-mode=prefill", "--disaggregation-mode"),
        ("--quantization awq", "--quantization awq: leave it out"),
        ("--init-expert-location loads.pt", r"--init-expert-location loads\.pt: give a \.json file"),
        ("--tp", "--tp needs a value"),
        ("--disable-radix-cache=true", "--disable-radix-cache takes no value"),
        ("--port 99999", "--port must be 0 to 65535"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static must be above 0"),
    ],
)
def test_a_refusal_names_the_option_in_a_line(command: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(command)
    assert cli.main(["launch_server", *command.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tercet: error: --")
    assert error.count("\n") == 1


def test_an_unknown_option_is_refused_as_by_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch_server", "--no-such-option", "5"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_the_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["launch_server", "--help"])
    text = capsys.readouterr().out
    assert "--tp-size, --tensor-parallel-size" in text
    assert "--enable-metrics: no effect" in text
    assert "--dcp-size" not in text


def test_every_name_of_the_tables_is_one_of_sglang() -> None:
    named = [*(alias.name for alias in ALIASES), *IGNORED, *INSTEAD]
    assert [name for name in named if name not in NAMES] == []
    assert len(set(named)) == len(named), "an option has one meaning"
    assert {arg.group for arg in server_args()} == set(GROUPS)
    assert len(set(NAMES)) == len(NAMES) > 500
