"""Whether there is enough text and enough room for what a job will read and write: asked before work begins.

Invariant: nothing here loads weights; what cannot be known cheaply is left to the job, which asks again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..engine.child import Child
from ..errors import NoSpace, UsageError
from ..model_file.header import ArrayView
from ..model_file.split import ModelFile
from ..units import format_size
from .target import free_bytes, shown

_BYTES_A_TOKEN = 64  # of text that are looked at for each token needed; words have some 4
_SURE = 0.9  # of the tokens that the rest of a text is expected to have
_MORE = "give more text: 50,000 tokens or more are usual"


def check_text(model: ModelFile, text: Path, tokens: int) -> float:
    """Raises UsageError when the file `text` has fewer than `tokens` tokens in the vocabulary of `model`.

    Returns tokens a byte, of the part that was looked at.
    """
    with text.open("rb") as file:
        data = file.read(_BYTES_A_TOKEN * tokens)
        whole = not file.read(1)
    with Child() as child:
        count = child.count_tokens(model.path, data.decode("utf-8", "replace"), add_special=True)
    if whole and count < tokens:
        raise UsageError(f"the text has {count} tokens; at least {tokens} are needed", _MORE)
    return count / max(len(data), 1)


def check_logits_room(model: ModelFile, text: Path, rate: float, chunk: int, most_chunks: int) -> None:
    """Raises NoSpace when the folder for temporary files cannot hold the logits that a report keeps of its source.

    `rate`: tokens a byte; `chunk` in tokens; `most_chunks` 0: the whole text.
    """
    view = model.metadata.get("tokenizer.ggml.tokens")
    vocabulary = view.count if isinstance(view, ArrayView) else 0
    chunks = int(_SURE * rate * text.stat().st_size) // chunk
    chunks = max(min(chunks, most_chunks or chunks), 1)
    needed = chunks * (chunk - chunk // 2) * vocabulary * 4
    folder = Path(tempfile.gettempdir())
    if (free := free_bytes(folder)) < needed:
        raise NoSpace(
            f"the report keeps some {format_size(needed)} of logits in {shown(folder)}, which has "
            f"{format_size(free)} free",
            "set TMPDIR to a folder on another disk, or read fewer chunks: --chunks N",
        )
