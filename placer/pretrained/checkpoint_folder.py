"""Folders of checkpoints, given by a path or by the name of a model on a hub."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from placer.errors import InputError, kind_of
from placer.estimator.checkpoints import CONFIG, transformers_library
from placer.utils.error_translation import reason
from placer.utils.extras import extra

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""Names of models on a hub: ``name`` or ``organisation/name``."""

_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Configurations and tokenizers."""

_WEIGHTS = ("*.safetensors", "*.bin")
"""Files of weights, the better format first; only one of them is downloaded."""

_COPIES = ["*/*", "consolidated*"]
"""Files that hold the same weights in another format."""

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def checkpoint_folder(path: Any) -> Path:
    """Return the folder of a checkpoint.

    Args:
        path: of the folder; or the name of a model on the hub, whose files transformers' own cache
            holds, or which are downloaded to it.

    Raises:
        InputError: there is no such folder or model, or the folder has no configuration.
        MissingExtraError: transformers is not installed.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path is {kind_of(path)}; give the path of a checkpoint folder")
    folder = Path(os.fspath(path))
    if not folder.exists():
        if not isinstance(path, str) or _NAME.fullmatch(path) is None:
            raise InputError(f"there is no folder {folder}; give the path of a checkpoint folder")
        folder = _downloaded(path)
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of the checkpoint")
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} has no {CONFIG}; give a folder as transformers' save_pretrained writes it,"
            " or make the model yourself and call placer.load(model, placement, path)"
        )
    return folder


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights."""
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer in a folder; None without one that can be read."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    library = transformers_library()
    try:
        return library.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever transformers raises about a tokenizer
        _log.warning("the tokenizer in %s cannot be read: %s", folder, error)
        return None


def _downloaded(name: str) -> Path:
    with extra("transformers"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    try:
        for weights in _WEIGHTS:
            folder = Path(
                snapshot_download(name, allow_patterns=[*_FILES, weights], ignore_patterns=_COPIES)
            )
            if has_weights(folder):
                break
    except LocalEntryNotFoundError as error:  # offline, or without an answer
        raise InputError(
            f"there is no folder {name}, and the hub could not be reached for a model of that name:"
            f" {reason(error)}; give the path of a checkpoint folder, or connect this machine to"
            " the hub (HF_ENDPOINT and HF_HUB_OFFLINE configure it)"
        ) from error
    except Exception as error:  # whatever the hub's library raises about names and access
        raise InputError(
            f"there is no folder {name}, and the hub did not provide a model of that name:"
            f" {reason(error)}; correct the path or name, or log in to the hub if the model is"
            " private or gated"
        ) from error
    return folder
