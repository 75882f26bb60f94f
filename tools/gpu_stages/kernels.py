"""Ceilings of the machine, correctness of each kernel on it, and performance of each."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tercet.kernels.attention.select import backend_names
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.tools.bench import Figure, ceilings, figures
from tercet.kernels.tools.check import OPS, Pair, check_attention, check_latent, verdict
from tercet.kernels.tools.triton_benchmarks import fused_figures
from tercet.kernels.tools.triton_checks import CHECKS
from tercet.kernels.tools.verification import Case, case_trouble, grid
from tercet.scheduler.device.oom import release_cached
from tools.gpu_stages.processes import NOT_RUN, words
from tools.gpu_stages.scale import Results, Scale

_GRIDS = ("triton", "flashinfer")

_Check = tuple[str, Case | None]
"""Name of a check, or one case of a check with many."""


def ceilings_of(scale: Scale) -> Results:
    """Return the ceilings that every other figure is compared with.

    The 2 GiB are freed, because other stages size a cache by free memory. In stages that start a server, this process
    keeps only its context.
    """
    copy, product = ceilings(scale.device, scale.dtype)
    release_cached()
    return {"copy_gb_per_s": copy.achieved, "bf16_tflop_per_s": product.achieved / 1000}


def machine(scale: Scale) -> Iterator[Results]:
    """Yield only the ceilings."""
    yield ceilings_of(scale)


def correctness(scale: Scale) -> Iterator[Results]:
    """Yield every attention backend and operation against its definition, and GPU backends over their whole grid.

    Several processes run checks, and compile the hundreds of kernels they check.
    """
    tasks: list[_Check] = [(name, None) for name in _checks(scale.device)]
    tasks += [(f"grid {name}", case) for name in _GRIDS for case in grid()]
    for said in words(partial(_checked, scale), tasks, scale.processes):
        checks = {name: _joined([said[task] for task in tasks if task[0] == name]) for name, _ in tasks}
        wrong = sorted(name for name, word in checks.items() if _is_wrong(word))
        yield {"checks": checks, "architecture": architecture(scale.device), "wrong": wrong}


def _checks(device: torch.device) -> dict[str, Callable[[], Pair]]:
    found: dict[str, Callable[[], Pair]] = {}
    found |= {f"attention {name}": partial(check_attention, name, device) for name in backend_names()}
    found |= {f"latent {name}": partial(check_latent, name, device) for name in backend_names(latent=True)}
    return found | {name: partial(op, device) for name, op in {**OPS, **CHECKS}.items()}


@torch.inference_mode()
def _checked(scale: Scale, check: _Check) -> str:
    """Return the result of a check. Raises the errors of `verdict` when the device fails."""
    name, case = check
    try:
        if case is None:
            trouble = verdict(_checks(scale.device)[name])
        else:
            trouble = case_trouble(name.removeprefix("grid "), case, scale.device, scale.dtype)
    except UnavailableBackendError as error:
        return f"not here: {error}"
    return trouble or "ok"


def _joined(said: Sequence[str]) -> str:
    """Return the result of all cases of a check: the first wrong one, the number of unknown ones, or the common one."""
    if wrong := [word for word in said if _is_wrong(word)]:
        return wrong[0]
    missing = said.count(NOT_RUN)
    return said[0] if missing in (0, len(said)) else f"{NOT_RUN}: {missing} of {len(said)}"


def _is_wrong(word: str) -> bool:
    return word != "ok" and not word.startswith(("not here", NOT_RUN))


def architecture(device: torch.device) -> str:
    """Return the name of the architecture in verified.json."""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"


def operations(scale: Scale) -> Iterator[Results]:
    """Yield each operation's share of the ceiling."""
    with torch.inference_mode():
        ceiling = {figure.unit: figure.achieved for figure in ceilings(scale.device, scale.dtype)}
        for figure in _figures(scale):
            share = figure.achieved / ceiling[figure.unit]
            yield {figure.name: {"achieved": figure.achieved, "unit": figure.unit, "share": share}}


def _figures(scale: Scale) -> Iterator[Figure]:
    yield from figures(scale.device, scale.dtype, "auto")
    yield from fused_figures(
        scale.device,
        scale.dtype,
        tokens=scale.operation_tokens,
        hidden=scale.operation_width,
        vocab=scale.large.vocab,
        rows=scale.operation_rows,
        context=scale.operation_context,
    )
