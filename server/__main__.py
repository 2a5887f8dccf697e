"""`python -m novainfer.server` is `novainfer serve`."""

import sys

from novainfer.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
