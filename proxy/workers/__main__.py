"""Entry point of a worker's process, started by ``proxy.workers.supervisor``."""

import sys

from proxy.workers.worker import main

if __name__ == "__main__":
    main(sys.argv[1])
