"""Model files on the Hugging Face Hub: which file a quant means, its size and digest, and fetching it.

Talks to the Hub through huggingface_hub alone (its settings, tokens, mirrors and HF_HUB_OFFLINE hold). Does not know
where the file ends up. Invariant: a file is only called fetched when its bytes have the digest that the Hub gives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ..errors import DownloadError, HgError, NotFound
from ..printable import printable
from .registry import HubSource
from .store import DISK_ERRORS, Progress

_USUAL = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q4_1", "MXFP4", "Q8_0", "Q6_K", "BF16", "F16")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_PATIENCE = 20.0  # seconds without a byte
_TRIES = 3  # without progress
_BLOCK = 1 << 20
# Words of names, not letters inside one: "Flora" is a model. A projector, a draft or MTP head is no model of its own.
_NO_MODEL = re.compile(
    r"(?:^|[-_./])(?:mmproj|imatrix|vocab|adapter|lora|mtp|draft|eagle\d?)(?=[-_./]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` empty: small files that the Hub does not keep as LFS have none."""

    name: str
    bytes: int
    sha256: str


class Hub(Protocol):
    """What is needed of the Hub; `HuggingFace` is the real one, tests have one in memory."""

    def files(self, repo: str, revision: str) -> Sequence[HubFile]:
        """All files of the repository."""

    def fetch(self, repo: str, file: HubFile, revision: str, folder: Path, progress: Progress) -> Path:
        """Downloads into `folder`, going on where an earlier call stopped."""


def choose(hub: Hub, source: HubSource) -> tuple[HubFile, ...]:
    """The file that `source` means, or all parts of it. Raises NotFound with what there is."""
    files = {file.name: file for file in hub.files(source.repo, source.revision)}
    names = pick(tuple(files), source)
    missing = [name for name in names if name not in files]
    if missing:
        raise NotFound(f"{source.repo} lacks the part {printable(missing[0])}", "the set there is not complete")
    return tuple(files[name] for name in names)


def pick(names: Sequence[str], source: HubSource) -> tuple[str, ...]:
    """Of a repository's `names` those of the wanted file (all parts of a split one), in order.

    Raises NotFound with what there is: where nothing fits, and where several models do.
    """
    models = [n for n in names if n.lower().endswith(".gguf") and not _NO_MODEL.search(n)]
    if not models:
        raise NotFound(f"{source.repo} holds no GGUF model", "look for a repository whose name ends in -GGUF")
    if source.file:
        chosen = [name for name in names if name in (source.file, source.file.lower())]
        chosen = chosen or [name for name in names if name.rpartition("/")[2] == source.file]
    else:
        wanted = (source.quant,) if source.quant else _USUAL
        chosen = next((found for quant in wanted if (found := [n for n in models if _has_quant(n, quant)])), [])
        if not chosen and not source.quant:
            chosen = models
    if not chosen:
        quants = sorted({match[0].upper() for name in models if (match := _QUANT.search(name))})
        there = f"it has {', '.join(quants)}" if quants else ""
        raise NotFound(f"{source.repo} has no {printable(source.quant or source.file)}", there)
    return _one_of(chosen, source.repo)


def _one_of(chosen: Sequence[str], repo: str) -> tuple[str, ...]:
    """The parts of the one model that `chosen` names; a whole file is taken before the same one in parts."""
    parts = {name: match for name in chosen if (match := _PART.fullmatch(name))}
    whole = sorted(name for name in chosen if name not in parts)
    stems = {name.lower().removesuffix(".gguf") for name in whole}
    sets = sorted({match[1] for match in parts.values() if match[1].lower() not in stems})
    if len(whole) + len(sets) > 1:
        found = ", ".join(printable(name) for name in [*whole, *sets][:8])
        raise NotFound(f"several models of {repo} fit: {found}", "name one: -hf user/repo -hff FILE.gguf")
    if whole:
        return (whole[0],)
    match = next(match for match in parts.values() if match[1] == sets[0])
    end = match[0][-5:]
    return tuple(f"{match[1]}-{index:05d}-of-{match[3]}{end}" for index in range(1, int(match[3]) + 1))


_QUANT = re.compile(r"(?<![A-Za-z0-9])(?:I?Q\d[A-Z0-9_]*|BF16|F16|F32|MXFP4|TQ\d_\d)(?=[-.])", re.IGNORECASE)


def _has_quant(name: str, quant: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


class HuggingFace:
    """The Hub through huggingface_hub, which is imported on first use: it costs a start 0.3 s."""

    def files(self, repo: str, revision: str) -> Sequence[HubFile]:
        """As Hub.files."""
        from huggingface_hub import HfApi

        with hub_errors(repo):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_PATIENCE)
        return [
            HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "") for file in info.siblings or ()
        ]

    def fetch(self, repo: str, file: HubFile, revision: str, folder: Path, progress: Progress) -> Path:
        """As Hub.fetch. The library's own download starts again from nothing in each process."""
        name = Path(file.name).name
        part = folder / f"{name}.{file.sha256[:16] or file.bytes}.part"
        with hub_errors(repo), part.open("ab") as out:
            stuck = 0
            while out.tell() < file.bytes:
                before = out.tell()
                try:
                    self._append(repo, file, revision, out, progress)
                except Exception as error:
                    stuck = 0 if out.tell() > before else stuck + 1
                    if stuck == _TRIES or not _passing(error):
                        raise
                    time.sleep(stuck)
            out.flush()
            os.fsync(out.fileno())
        return part.rename(folder / name)

    def _append(self, repo: str, file: HubFile, revision: str, out: BinaryIO, progress: Progress) -> None:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        # Compressed on the way, bytes could not be counted.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={out.tell()}-"}
        url = hf_hub_url(repo, file.name, revision=revision)
        with get_session().stream("GET", url, headers=headers, timeout=_PATIENCE, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            if answer.status_code != 206:  # the server cannot go on in the middle
                out.truncate(0)
                out.seek(0)
            for block in answer.iter_raw(_BLOCK):
                if out.tell() + len(block) > file.bytes:
                    raise DownloadError(f"{file.name} is longer than the {file.bytes:,} bytes that the Hub names")
                out.write(block)
                progress(out.tell(), file.bytes)


def _passing(error: Exception) -> bool:
    """Whether trying again may help: not when the Hub or the disk has said no."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return False
    return not isinstance(error, HgError | HfHubHTTPError | OfflineModeIsEnabled)


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into DownloadError or NotFound, one sentence each."""
    from huggingface_hub import errors

    # What it has to say is in our errors; its own warnings would stand between them and the progress bar.
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if "HF_HUB_VERBOSITY" not in os.environ:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except HgError:
        raise
    except errors.GatedRepoError:
        hint = "accept the terms on the model's page, then log in with: hf auth login"
        raise DownloadError(f"{repo} asks for its terms to be accepted first", hint) from None
    except errors.RepositoryNotFoundError:
        raise NotFound(
            f"the Hub has no repository {repo}", "check the name; a private one needs: hf auth login"
        ) from None
    except errors.EntryNotFoundError:
        raise NotFound(f"{repo} no longer has that file", "give the quant you want: user/repo:QUANT") from None
    except errors.OfflineModeIsEnabled:
        raise DownloadError(f"{repo} is not fetched: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE") from None
    except errors.HfHubHTTPError as error:
        raise DownloadError(f"the Hub refused {repo}: {_short(error)}", "try again later") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        # Every library below has its own classes for a network that fails.
        raise DownloadError(f"the Hub cannot be reached for {repo}: {_short(error)}", "check the network") from None
    finally:
        logger.setLevel(level)


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return printable(lines[0] if lines else type(error).__name__, limit=120)
