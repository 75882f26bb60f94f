"""The errors of this package.

KernelsError
├── BusyDeviceError
├── DeviceFailedError
└── UnavailableBackendError
"""


class KernelsError(Exception):
    """Anything this package raises on purpose."""


class BusyDeviceError(KernelsError):
    """A GPU that torch knows, and on which nothing can be computed now: others have its memory, or all of it."""


class DeviceFailedError(KernelsError):
    """A computation left an accelerator so that nothing this process computes there means anything any more."""


class UnavailableBackendError(KernelsError):
    """A backend that does not exist or cannot run on this machine."""
