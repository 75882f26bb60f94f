"""Runner of the micro-benchmarks of `benchmarks/micro`, which prints each figure with its target.

python -m tools.bench_micro [NAME ...]: only the named files. The exit status says whether every benchmark ran, not
whether it was fast: machines differ, and only ratios taken on one machine are comparable.
"""

import importlib.util
import platform
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks" / "micro"


def run(path: Path) -> None:
    """Load one file and print its rows."""
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, measured, unit, target in module.rows():
        beside = "" if target is None else f"target {target:>12,.2f} {unit}"
        print(f"{path.stem:12} {name:62} {measured:>14,.2f} {unit:10} {beside}", flush=True)


def main(names: list[str]) -> None:
    """Run all files, or the named ones."""
    print(f"Python {platform.python_version()} on {platform.machine()}, medians")
    for path in sorted(FOLDER.glob("*.py")):
        if not names or path.stem in names:
            run(path)


if __name__ == "__main__":
    main(sys.argv[1:])
