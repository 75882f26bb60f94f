"""The command line interface `tercet-kernels`."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from tercet.kernels.attention.select import attention_backend, backend_names
from tercet.kernels.device import default_device, describe_machine
from tercet.kernels.errors import BusyDeviceError, DeviceFailedError, UnavailableBackendError
from tercet.kernels.native.library import describe_library, load_library, missing_library
from tercet.kernels.tools import native_checks
from tercet.kernels.tools.bench import Figure, ceilings, figures
from tercet.kernels.tools.check import OPS, Pair, check_attention, check_latent, verdict
from tercet.kernels.tools.native_benchmarks import native_figures
from tercet.kernels.triton import missing_triton


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code, which is 1 if the output cannot be written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # open until the process exits  # noqa: SIM115
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        for stream, text in ((sys.stdout, ""), (sys.stderr, f"tercet-kernels: {error.strerror}\n")):
            try:
                stream.write(text)
                stream.flush()
            except OSError:  # otherwise the interpreter flushes again at exit, and exits with 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="tercet-kernels", description="What Tercet's tensor operations do here.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say what runs on this machine, and whether it is right; fails if it is not")
    commands.add_parser("describe", help="say what this machine has, and check nothing")
    bench = commands.add_parser("bench", help="measure each operation beside this machine's own ceilings")
    bench.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    bench.add_argument("--attention", default="auto", choices=["auto", *backend_names()])
    compiler = commands.add_parser("compile", help="compile every Triton kernel for GPUs that need not be here")
    compiler.add_argument("--architecture", type=int, nargs="+", default=[80, 90], metavar="SM")
    compiler.add_argument("--case", nargs="+", metavar="NAME", help="only these; otherwise all")
    options = parser.parse_args(arguments)
    if options.command == "compile":
        return _compile(options.architecture, options.case)
    if options.command == "describe":
        return _describe()
    try:
        with torch.inference_mode():
            return _check() if options.command == "check" else _bench(options.dtype, options.attention)
    except BusyDeviceError as error:
        _print_line(str(error))
        return 1


def _describe() -> int:
    """Print the facts that decide which kernels run."""
    missing = missing_library()
    native = f"none: {missing}" if missing else describe_library(load_library())
    for name, value in {**describe_machine(), "native kernels": native}.items():
        _print_line(f"{name:14} {value}")
    return 0


def _check() -> int:
    _describe()
    device, missing = default_device(), missing_library()
    checks: dict[str, Callable[[], Pair]] = {}
    checks |= {f"attention {name}": partial(check_attention, name, device) for name in backend_names()}
    checks |= {f"latent {name}": partial(check_latent, name, device) for name in backend_names(latent=True)}
    checks |= {name: partial(op, device) for name, op in OPS.items()}
    if not missing:
        checks |= native_checks.CHECKS
    if device.type == "cuda" and not missing_triton(device):
        from tercet.kernels.tools.triton_checks import CHECKS

        checks |= {name: partial(op, device) for name, op in CHECKS.items()}
    return _run_checks(checks)


def _run_checks(checks: Mapping[str, Callable[[], Pair]]) -> int:
    """Run the checks, print a line for each, and return the exit code."""
    failures, failed = 0, False
    for name, run in checks.items():
        if failed:
            _print_line(f"{name:24} not run: the device has failed")
            continue
        try:
            trouble = verdict(run)
        except UnavailableBackendError as error:
            _print_line(f"{name:24} not here: {error}")
            continue
        except DeviceFailedError as error:
            trouble, failed = str(error), True
        failures += bool(trouble)
        _print_line(f"{name:24} {trouble or 'ok'}")
    return min(failures, 1)


def _bench(dtype_name: str, attention: str) -> int:
    device, dtype = default_device(), getattr(torch, dtype_name)
    ceiling = {}
    _print_line(f"{device.type}, {dtype_name}, attention {attention_backend(attention, device).__name__}")
    for figure in ceilings(device, dtype):
        ceiling[figure.unit] = figure.achieved
        _print_line(f"{figure.name:26} {figure.achieved:9.1f} {figure.unit} (ceiling)")
    for figure in _figures(device, dtype, attention):
        share = figure.achieved / ceiling[figure.unit]
        _print_line(
            f"{figure.name:26} {figure.achieved:9.1f} {figure.unit:8} {share:6.1%}  {figure.seconds * 1e3:9.3f} ms"
        )
    return 0


def _figures(device: torch.device, dtype: torch.dtype, attention: str) -> Iterator[Figure]:
    yield from figures(device, dtype, attention)
    if device.type == "cpu" and not missing_library():
        yield from native_figures()
    if device.type == "cuda" and not missing_triton(device):
        from tercet.kernels.tools.triton_benchmarks import fused_figures

        yield from fused_figures(device, dtype)


def _compile(architectures: Sequence[int], cases: Sequence[str] | None) -> int:
    from tercet.kernels.tools.compiling import compile_case, resources_of
    from tercet.kernels.tools.launch_specs import CASES

    failures = 0
    for name in CASES if cases is None else cases:
        for architecture in architectures:
            try:
                kernels = compile_case(name, architecture)
            except UnavailableBackendError as error:
                _print_line(f"{name:26} sm{architecture} not there: {error}")
                continue
            for kernel in kernels:
                failures += bool(kernel.trouble)
                size = f"{kernel.cubin:7} bytes, {kernel.shared:6} shared"
                if kernel.machine_code:
                    found = resources_of(kernel.machine_code)
                    size += f", {found.registers:3} registers, {found.spilled:4} spilled"
                    size += f", {found.instructions:5} instructions"
                _print_line(f"{name:26} sm{architecture} {kernel.kernel:22} {size} {kernel.trouble or 'ok'}")
    return min(failures, 1)


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
