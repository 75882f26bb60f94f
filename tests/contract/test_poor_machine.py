"""Commands on a constrained machine: closed, full or unread streams, and a low limit of open files.

The exit status is right, and the fault is one line.
"""

import os
import subprocess
import sys

import pytest

TERCET = "import sys; from tercet.frontend.cli.command import main; sys.exit(main())"
PROGRAMS = {
    "tercet": ("-c", TERCET),
    "tercet-frontend": ("-m", "tercet.frontend"),
    "tercet-scheduler": ("-m", "tercet.scheduler"),
    "tercet-detokenizer": ("-m", "tercet.detokenizer"),
}
REFUSED = {
    "tercet": ("serve", "--port=many"),
    "tercet-frontend": ("--listen=nonsense", "--port=0"),
    "tercet-scheduler": ("--listen=nonsense",),
    "tercet-detokenizer": ("--listen=nonsense",),
}
ALL_CLOSED = "<&- >&- 2>&-"


def shell(streams: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command whose streams a shell redirects, without PYTHONUNBUFFERED unless `env` sets it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | (env or {})
    command = ["bash", "-c", f'exec "$@" {streams}', "bash", sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-", ">&-", ALL_CLOSED])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_refused_option_ends_with_its_own_status(program: str, streams: str) -> None:
    done = shell(streams, *PROGRAMS[program], *REFUSED[program])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == ("2>" not in streams)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_output_that_cannot_be_written_is_an_error_of_one_line(program: str, unbuffered: str) -> None:
    done = shell(">/dev/full", *PROGRAMS[program], "--version", env={"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("streams", [">&-", "2>/dev/full", ALL_CLOSED])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_no_process_reads_is_no_error(program: str, streams: str) -> None:
    done = shell(streams, *PROGRAMS[program], "--version")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("streams", ["2>/dev/full", ALL_CLOSED])
def test_keys_are_made_whatever_the_streams_are(streams: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("keys") / "made"
    assert shell(streams, *PROGRAMS["tercet"], "keys", str(directory)).returncode == 0
    assert (directory / "scheduler" / "secret").stat().st_size == 41
    assert shell(streams, *PROGRAMS["tercet"], "keys", str(directory)).returncode == 2


@pytest.mark.parametrize("words", [("chat",), ("bench", "serve")])
@pytest.mark.parametrize("streams", ["2>/dev/full", ALL_CLOSED])
def test_a_client_of_no_server_fails_whatever_the_streams_are(words: tuple[str, ...], streams: str) -> None:
    done = shell(streams, *PROGRAMS["tercet"], *words, "--url", "http://127.0.0.1:9")
    assert done.returncode in {1, 2}, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_that_may_open_too_few_files_says_so_and_does_not_start(
    program: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    listen = f"--listen=ipc://{tmp_path_factory.mktemp('few')}"
    own = {"tercet": ("serve", "embedded", "--port=0"), "tercet-frontend": ("--port=0", listen)}
    words = own.get(program, (listen,))
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable, *PROGRAMS[program], *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == (1 if program == "tercet" else 2)
    assert done.stderr.startswith(program)
    assert "may open 64 files, and needs at least" in done.stderr
    assert done.stderr.count("\n") == 1
