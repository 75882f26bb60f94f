"""The errors of this package.

KernelsError
├── DeviceFailedError
└── UnavailableBackendError
"""


class KernelsError(Exception):
    """Anything this package raises on purpose."""


class DeviceFailedError(KernelsError):
    """A computation left an accelerator so that nothing this process computes there means anything any more."""


class UnavailableBackendError(KernelsError):
    """A backend that does not exist or cannot run on this machine."""
