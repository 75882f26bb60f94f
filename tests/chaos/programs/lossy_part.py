"""Part that silently loses one in a hundred of the messages it sends.

Usage: python tests/chaos/programs/lossy_part.py MODULE OPTIONS
"""

import random
import runpy
import sys
from collections.abc import Sequence

from tercet.protocol import node_core
from tercet.protocol.messages.codec import Frame
from tercet.protocol.transport.channel import Outbox

LOST = 0.01


class LossyOutbox(Outbox):
    """Outbox that drops messages and reports them as sent."""

    def send(self, frames: Sequence[Frame]) -> bool:
        return random.random() < LOST or super().send(frames)


if __name__ == "__main__":
    vars(node_core)["Outbox"] = LossyOutbox
    _, module, *sys.argv[1:] = sys.argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)
