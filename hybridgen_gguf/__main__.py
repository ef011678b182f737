"""Where `hgguf` and `python -m hybridgen_gguf` start: Ctrl-C while modules still load ends as quietly as later."""

import _signal  # type: ignore[import-not-found]  # the C part of `signal`: there before anything else is imported

_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _ours:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import os  # noqa: E402  # only after Ctrl-C has its default action


def main() -> None:
    """Runs the command line."""
    # numpy's BLAS starts a thread for each core, with memory of its own, and what is done here needs one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .cli.app import main as run

    if _ours:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
