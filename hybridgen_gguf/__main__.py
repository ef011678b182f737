"""`python -m hybridgen_gguf` is `hgguf`."""

from .cli import main

if __name__ == "__main__":
    main()
