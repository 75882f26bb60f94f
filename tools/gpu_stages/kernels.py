"""What the machine gives, whether each kernel is right on it, and what each achieves."""

from collections.abc import Iterator

import torch

from tercet.kernels.attention.latent import latent_backend_names
from tercet.kernels.attention.select import backend_names
from tercet.kernels.attention.verifying import grid_trouble
from tercet.kernels.bench import Figure, ceilings, figures
from tercet.kernels.check import OPS, check_attention, check_latent, verdict
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.triton.checks import CHECKS
from tercet.kernels.triton.figures import fused_figures
from tools.gpu_stages.scale import Results, Scale


def ceilings_of(scale: Scale) -> Results:
    """What every other figure is held against."""
    copy, product = ceilings(scale.device, scale.dtype)
    return {"copy_gb_per_s": copy.achieved, "bf16_tflop_per_s": product.achieved / 1000}


def machine(scale: Scale) -> Iterator[Results]:
    """The ceilings alone."""
    yield ceilings_of(scale)


def correctness(scale: Scale) -> Iterator[Results]:
    """Every attention backend and every operation against its definition, and GPU backends over their whole grid."""
    checks = {f"attention {name}": lambda name=name: check_attention(name, scale.device) for name in backend_names()}
    checks |= {f"latent {name}": lambda name=name: check_latent(name, scale.device) for name in latent_backend_names()}
    checks |= {name: lambda op=op: op(scale.device) for name, op in {**OPS, **CHECKS}.items()}
    found: dict[str, str] = {}
    for name, run in checks.items():
        with torch.inference_mode():
            try:
                found[name] = verdict(run) or "ok"
            except UnavailableBackendError as error:
                found[name] = f"not here: {error}"
    for name in ("triton", "flashinfer"):
        with torch.inference_mode():
            try:
                found[f"grid {name}"] = grid_trouble(name, scale.device, scale.dtype) or "ok"
            except UnavailableBackendError as error:
                found[f"grid {name}"] = f"not here: {error}"
        yield {"checks": found, "architecture": architecture(scale.device)}
    wrong = sorted(name for name, word in found.items() if word != "ok" and not word.startswith("not here"))
    yield {"wrong": wrong}


def architecture(device: torch.device) -> str:
    """As verified.json names it."""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"


def operations(scale: Scale) -> Iterator[Results]:
    """Each operation's share of the ceiling."""
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
