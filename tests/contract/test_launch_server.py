"""The options that `tercet launch_server` hands to one part exist in that part, and the module runs."""

import subprocess
import sys
from dataclasses import fields

from tercet.frontend.cli.launch_server.aliases import ALIASES
from tercet.frontend.config.config import ServingConfig
from tercet.scheduler.config import ExpertOptions, ModelOptions, ScheduleOptions

PARTS = ModelOptions, ScheduleOptions, ExpertOptions


def test_options_for_one_part_exist_in_it() -> None:
    known = {
        *(f"--scheduler.{each.name}" for options in PARTS for each in fields(options)),
        *(f"--frontend.{each.name}" for each in fields(ServingConfig)),
    }
    names = [alias.ours.partition("=")[0].replace("-", "_").replace("__", "--", 1) for alias in ALIASES]
    handed = [name for name in names if "." in name]
    assert handed
    assert [name for name in handed if name not in known] == []


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "tercet.frontend.launch_server", "--trust-remote-code"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("tercet: error: --trust-remote-code is an option of SGLang")
