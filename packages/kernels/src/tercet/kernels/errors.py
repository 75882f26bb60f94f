"""Exceptions of this package.

KernelsError
├── BusyDeviceError
├── DeviceFailedError
└── UnavailableBackendError
"""


class KernelsError(Exception):
    """Base class of the exceptions that this package raises on purpose."""


class BusyDeviceError(KernelsError):
    """A GPU that torch supports cannot be used now: other processes hold its memory, or the GPU exclusively."""


class DeviceFailedError(KernelsError):
    """A computation left an accelerator in a state in which later results of this process cannot be trusted."""


class UnavailableBackendError(KernelsError):
    """A backend does not exist or cannot run on this machine."""
