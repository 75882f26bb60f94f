"""Known vulnerabilities of the pins in constraints.txt, by pip-audit and the OSV database.

`hatch run audit:pins` runs this in an environment of its own. Exit status: 0 if there are none, 1 if pip-audit found
some or failed, 2 if OSV cannot be reached. Options are those of pip-audit: `--format json`, `--ignore-vuln ID`.
"""

import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).parents[1] / "constraints.txt"
_UNREACHABLE = tuple(f"requests.exceptions.{name}:" for name in ("ConnectionError", "ConnectTimeout", "ReadTimeout"))


def main() -> int:
    """Run pip-audit on all pins, without resolving or installing anything."""
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--progress-spinner", "off"]
    command += ["--requirement", str(PINS), "--no-deps", "--disable-pip", *sys.argv[1:]]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    *_, last = done.stderr.splitlines() or [""]
    if done.returncode and last.startswith(_UNREACHABLE):
        print(f"audit: nothing was checked: the vulnerability service cannot be reached. {last}", file=sys.stderr)
        return 2
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
