"""Records of stages: each in a file of its own, and those of a run in one, its *bundle*."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.gpu_stages.processes import NOT_RUN
from tools.gpu_stages.scale import Results

Records = dict[str, dict[str, Results]]
"""By device and stage."""


def write(record: Results, out: Path, bundle: Path | None = None) -> Path:
    """Keep a record in a file of its own, and in a bundle, where it takes the place of one of its device and stage."""
    path = out / f"{device_name(record)}-{record['stage']}.json"
    _put(path, record)
    if bundle is not None:
        others = [other for other in read_file(bundle) if _whose(other) != _whose(record)]
        _put(bundle, [*others, record])
    return path


def read(out: Path) -> Records:
    """Those in the files of a folder, in which there may be others."""
    return by_device(record for path in out.glob("*.json") for record in read_file(path) if "stage" in record)


def read_file(path: Path) -> list[Results]:
    """Those of a bundle, or the one of a file of its own; none where there is no file."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, list) else [content]


def unbundle(bundle: Path, out: Path) -> list[Path]:
    """Write every record of a bundle into a file of its own."""
    return [write(record, out) for record in read_file(bundle)]


def by_device(records: Iterable[Results]) -> Records:
    """The last of each device and stage."""
    found: Records = {}
    for record in sorted(records, key=lambda record: str(record["date"])):
        found.setdefault(device_name(record), {})[record["stage"]] = record
    return found


def device_name(record: Mapping[str, Any]) -> str:
    """The GPU of a record, as files are named: without what is said of it, or of why there is none."""
    name = re.split("[,:]", record["machine"].get("gpu 0", record["machine"].get("gpu", "none")))[0]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def trouble_of(correctness: Mapping[str, Any]) -> str:
    """Why a record does not show that kernels are right; empty where it does."""
    results = correctness["results"]
    missing = sum(word.startswith(NOT_RUN) for word in results.get("checks", {}).values())
    parts = [f"wrong: {', '.join(results['wrong'])}"] if results.get("wrong") else []
    parts += [f"{missing} {NOT_RUN}"] if missing else []
    parts += [] if correctness["complete"] else ["cut off"]
    return "; ".join(parts)


def shows_equality(record: Results, backend: str, architecture: str) -> bool:
    """Whether a record of correctness shows what verified.json says of a backend."""
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
    """A reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
