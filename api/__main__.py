"""`python -m novainfer` is `novainfer`."""

import sys

from novainfer.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
