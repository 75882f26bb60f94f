"""The table of architectures and the records of the families."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tercet.scheduler.architectures import MODULES, WRAPPERS, generators
from tercet.scheduler.models import families
from tercet.scheduler.models.family import EncoderFamily, ModelFamily
from tercet.scheduler.models.registry import family_of

_ROOT = Path(families.__path__[0])
FILES = [path.relative_to(_ROOT).with_suffix("").as_posix() for path in _ROOT.rglob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("name", FILES)
def test_the_table_has_the_architectures_of_each_record(name: str) -> None:
    module = importlib.import_module(f"{families.__name__}.{name.replace('/', '.')}")
    records: tuple[ModelFamily | EncoderFamily, ...] = module.FAMILIES
    listed = [architecture for record in records for architecture in record.architectures]
    assert sorted(listed) == sorted(architecture for architecture, module in MODULES.items() if module == name)


@pytest.mark.parametrize("architecture", generators())
def test_the_record_of_an_architecture_is_found(architecture: str) -> None:
    for text in WRAPPERS.get(architecture, {"": architecture}).values():
        family = family_of(text)
        assert isinstance(family, ModelFamily)
        assert text in family.architectures


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import tercet.scheduler.model_task, tercet.scheduler.architectures; print('torch' in sys.modules)", "False"),
        (
            "from tercet.scheduler.models.registry import family_of; family_of('Qwen3ForCausalLM'); "
            "print(*(name for name in sys.modules if name.startswith('tercet.scheduler.models.families.')))",
            "tercet.scheduler.models.families.qwen3",
        ),
    ],
)
def test_only_what_is_needed_is_imported(script: str, expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys; {script}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
