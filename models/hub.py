"""Models by name: a local folder, or one of the Hugging Face hub where there is a network."""

from __future__ import annotations

import json
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from . import weights
from .errors import UserError

# Names that the hub knew before models had owners.
_SHORT = {
    **{n: f"openai-community/{n}" for n in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
# Seconds after which the hub counts as out of reach. A name server that is silent, and the hub
# client's own retries, would take minutes.
PATIENCE = 6.0
_TOKENIZER = "tokenizer.json (or vocab.json and merges.txt)"
_MODEL = (
    f"config.json, {weights.SAFETENSORS} (or shards and {weights.SAFETENSORS}.index.json, or "
    f"{weights.PICKLE})"
)

Get = Callable[[str], Path | None]


def is_name(text: str) -> bool:
    """Whether `text` can only be a name on the hub: "gpt2", "owner/model", but no local path."""
    if Path(text).exists():
        return False
    owner = Path(text.split("/")[0])
    return text in _SHORT or (bool(_NAME.fullmatch(text)) and not owner.exists())


def folder(name: str, model: bool = True) -> Path:
    """The folder of a model on the hub, downloaded or from the hub client's cache.

    Takes the config, the weights (one format of them) and the tokenizer; with `model=False` the
    tokenizer alone.

    Raises:
      UserError: no such model, no hub client, or no network and not in the cache: then within
        seconds, with the files that are needed.
    """
    wanted = f"{_MODEL}, {_TOKENIZER}" if model else _TOKENIZER
    by_hand = f"put {wanted} into a folder and name that"
    repo = _SHORT.get(name, name)
    try:
        from huggingface_hub import constants, errors, hf_hub_download
    except ImportError as error:
        raise UserError(
            f"no folder {name}, and no huggingface_hub to download {repo}: install it, or {by_hand}"
        ) from error
    endpoint = constants.ENDPOINT
    trouble = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _trouble(endpoint)

    def get(file: str) -> Path | None:
        """The file's path, None when the model, or offline the cache, does not have it."""
        try:
            offline = trouble is not None
            return Path(hf_hub_download(repo, file, local_files_only=offline))
        except errors.LocalEntryNotFoundError as error:
            if trouble is None:
                raise UserError(f"{endpoint} stopped answering: {_line(error)}") from error
            return None
        except errors.EntryNotFoundError:
            return None
        except errors.GatedRepoError as error:
            raise UserError(f"{repo} is not open to all: {_line(error)}") from error
        except errors.RepositoryNotFoundError as error:
            raise UserError(f"no folder {name}, and no model {repo} at {endpoint}") from error
        except (errors.HfHubHTTPError, OSError) as error:
            raise UserError(f"{repo} cannot be downloaded: {_line(error)}") from error

    found = _model(get) if model else None
    tokenizer = get("tokenizer.json") or (get("vocab.json") and get("merges.txt"))
    get("tokenizer_config.json")
    found = found if model else tokenizer and tokenizer.parent
    if found is None:
        why = f"cannot be had from {endpoint} ({trouble})" if trouble else "lacks some files"
        raise UserError(f"no folder {name}, and {repo} {why}: {by_hand}")
    return found


def _model(get: Get) -> Path | None:
    """The folder with config and weights, None when one of them is missing."""
    config = get("config.json")
    for name in weights.FILES if config else ():
        path = get(name)
        if path and path.suffix == ".json":
            shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
            path = path if all([get(shard) for shard in sorted(shards)]) else None
        if path:
            return path.parent
    return None


def _trouble(endpoint: str) -> str | None:
    """Why the hub cannot be reached, None when it can."""
    answer = ["no answer"]

    def ask() -> None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE
            ).close()
            answer[0] = ""
        except urllib.error.HTTPError:
            answer[0] = ""  # Of the hub or of a proxy: the client knows what to make of it.
        except OSError as error:
            # Certificates are the client's business: it may trust others.
            reason = getattr(error, "reason", error)
            answer[0] = "" if isinstance(reason, ssl.SSLError) else str(reason) or repr(reason)

    # A look-up of a name cannot be interrupted: it is left behind.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answer[0] or None


def _line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
