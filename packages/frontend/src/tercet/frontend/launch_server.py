"""`python -m tercet.frontend.launch_server`: the command `tercet launch_server`, as SGLang's module of this name."""

import sys

from tercet.frontend.cli.command import main

if __name__ == "__main__":
    sys.exit(main(["launch_server", *sys.argv[1:]]))
