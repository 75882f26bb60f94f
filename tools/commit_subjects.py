"""Check commit subjects: `area: imperative subject`, at most 72 characters.

`--message FILE` checks one message, as git's commit-msg hook does; without it, the commits since the rule was
introduced are checked, as CI does.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
FIRST = "docs/contributing/style.md"
"""The commit that added this file is the first one that the rule holds for."""
_SUBJECT = re.compile(r"[a-z0-9_.-]+(/[A-Za-z0-9_.-]+)*(, [a-z0-9_./-]+)*: [a-z0-9`][^\n]*[^.\s]")
_NOT_IMPERATIVE = re.compile(r": (a|an|the|what|whether|how|who|which|of|as|those|that|where|when|it|no|every|each)\b")


def fault(subject: str) -> str:
    """Return the fault of a commit subject, or an empty string."""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return ""
    if len(subject) > LONGEST:
        return f"it has {len(subject)} characters, {LONGEST} are allowed"
    if not _SUBJECT.fullmatch(subject):
        return "it must read `area: imperative subject`, lower case after the colon, without a full stop"
    if _NOT_IMPERATIVE.search(subject):
        return "it must begin with an imperative verb after the colon"
    return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout  # noqa: S607


def subjects() -> list[str]:
    """Return the subjects of all commits since the rule; empty in a shallow clone without them."""
    introduced = _git("log", "--diff-filter=A", "--format=%H", "--", FIRST).split()
    return _git("log", "--no-merges", "--format=%s", f"{introduced[-1]}..HEAD").splitlines() if introduced else []


def main() -> int:
    """Print every faulty subject; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--message", type=Path, help="file with one commit message")
    message: Path | None = parser.parse_args().message
    checked = message.read_text(encoding="utf-8").splitlines()[:1] if message else subjects()
    faults = [f"{subject!r}: {why}" for subject in checked if (why := fault(subject))]
    for line in faults:
        print(line, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
