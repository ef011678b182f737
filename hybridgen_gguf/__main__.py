"""Where `hgguf` and `python -m hybridgen_gguf` start: Ctrl-C while modules still load ends as quietly as later."""

import os
import sys


def main() -> None:
    """Runs the command line."""
    # numpy's BLAS starts a thread for each core, with memory of its own, and what is done here needs one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
