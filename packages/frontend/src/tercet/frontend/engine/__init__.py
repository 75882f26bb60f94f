"""`Engine`: a whole server in one Python object, without HTTP."""

from tercet.frontend.engine.client import EngineError
from tercet.frontend.engine.engine import Completion, Engine

__all__ = ["Completion", "Engine", "EngineError"]
