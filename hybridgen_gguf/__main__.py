"""Where `hgguf` and `python -m hybridgen_gguf` start: Ctrl-C while modules still load ends as quietly as later."""

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
