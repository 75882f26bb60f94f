"""Command line: options that cannot work end the process with one line."""

import pytest

from tercet.detokenizer.__main__ import EXIT_CONFIG, app, main
from tercet.detokenizer.config import DetokenizerConfig
from tercet.detokenizer.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--max-choices", "0"], "--max-choices must be at least 1"),
        (["--drain-grace", "-1"], "--drain-grace must be between"),
        (["--max-choises", "3"], "--max-choises"),
        (["--drain-grace", "soon"], "--drain-grace"),
        (["--listen", "somewhere"], "'somewhere' is neither ipc://"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(
    options: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == EXIT_CONFIG
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("tercet-detokenizer: ")
    assert complaint in line


def test_every_option_of_the_configuration_can_be_given() -> None:
    fields = DetokenizerConfig.__dataclass_fields__
    _, bound, _ = app.parse_args([f"--{name.replace('_', '-')}={SAMPLES[name]}" for name in fields])
    config = bound.arguments["config"]
    assert {name: str(getattr(config, name)) for name in fields} == SAMPLES
    assert len(fields) <= 15


SAMPLES = {
    "peer": "d7",
    "listen": "ipc:///run/x",
    "advertise": "tcp://127.0.0.1:9",
    "keys": "/run/keys",
    "insecure_loopback": "True",
    "supervisor": "ipc:///run/s",
    "parent_fd": "5",
    "log_level": "debug",
    "log_format": "json",
    "max_choices": "9",
    "max_backlog": "8",
    "drain_grace": "0.5",
}


def test_limits_are_checked_however_the_configuration_is_made() -> None:
    with pytest.raises(ConfigError):
        DetokenizerConfig(max_backlog=0)
