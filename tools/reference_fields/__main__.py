"""Write the lists of fields, or compare them with the installed source: python -m tools.reference_fields [--check]."""

import argparse
import difflib
import sys

from tools.reference_fields import decoders


def main() -> int:
    """Write the files, or return 1 and print the differences where `--check` finds some."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference_fields", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    text = decoders.written()
    if not check:
        decoders.FILE.write_text(text)
        return 0
    stored = decoders.FILE.read_text() if decoders.FILE.is_file() else ""
    difference = list(difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "installed", lineterm=""))
    sys.stdout.writelines(f"{line}\n" for line in difference)
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main())
