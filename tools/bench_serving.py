"""`tercet bench serve` from a checkout.

python tools/bench_serving.py [W1 ...] --url URL [--json]; --help lists the rest.
"""

import sys

from tercet.frontend.cli.bench.command import app

if __name__ == "__main__":
    sys.exit(app(["serve", *sys.argv[1:]]))
