"""Records of stages, each in a file of its own, and all of a run in one file, its *bundle*."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.gpu_stages.processes import NOT_RUN
from tools.gpu_stages.scale import Results

Records = dict[str, dict[str, Results]]
"""Records by device and stage."""


def write(record: Results, out: Path, bundle: Path | None = None) -> Path:
    """Write a record to a file of its own, and to a bundle, where it replaces the one of its device and stage."""
    path = out / f"{device_name(record)}-{record['stage']}.json"
    _put(path, record)
    if bundle is not None:
        others = [other for other in read_file(bundle) if _whose(other) != _whose(record)]
        _put(bundle, [*others, record])
    return path


def read(out: Path) -> Records:
    """Return the records among the files of a folder."""
    return by_device(record for path in out.glob("*.json") for record in read_file(path) if "stage" in record)


def read_file(path: Path) -> list[Results]:
    """Return the records of a bundle, or of a single file; empty if the file does not exist."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, list) else [content]


def unbundle(bundle: Path, out: Path) -> list[Path]:
    """Write every record of a bundle to a file of its own."""
    return [write(record, out) for record in read_file(bundle)]


def by_device(records: Iterable[Results]) -> Records:
    """Return the last record of each device and stage."""
    found: Records = {}
    for record in sorted(records, key=lambda record: str(record["date"])):
        found.setdefault(device_name(record), {})[record["stage"]] = record
    return found


def device_name(record: Mapping[str, Any]) -> str:
    """Return a record's GPU as used in file names, without remarks."""
    name = re.split("[,:]", record["machine"].get("gpu 0", record["machine"].get("gpu", "none")))[0]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def trouble_of(correctness: Mapping[str, Any]) -> str:
    """Return why a record does not show that kernels are correct; empty if it does."""
    results = correctness["results"]
    missing = sum(word.startswith(NOT_RUN) for word in results.get("checks", {}).values())
    parts = [f"wrong: {', '.join(results['wrong'])}"] if results.get("wrong") else []
    parts += [f"{missing} {NOT_RUN}"] if missing else []
    parts += [] if correctness["complete"] else ["cut off"]
    return "; ".join(parts)


def shows_equality(record: Results, backend: str, architecture: str) -> bool:
    """Return whether a record of correctness shows the entry of a backend in verified.json."""
    results = record["results"]
    return (
        record["stage"] == "correctness"
        and bool(record["complete"])
        and results["wrong"] == []
        and results["architecture"] == architecture
        and results["checks"][f"grid {backend}"] == "ok"
    )


def _whose(record: Results) -> tuple[str, str]:
    return device_name(record), record["stage"]


def _put(path: Path, content: object) -> None:
    """Replace the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
