"""Formats that list the ranks of each stage in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from placer.errors import InputError
from placer.utils.units import count_text


def json_object(text: str, title: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return an object that a text contains as JSON.

    Raises:
        InputError: the text is not JSON, or is not an object with these fields.
    """
    wanted = f"give an object with {' and '.join(map(repr, keys))}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{title} is not JSON: {error}; {wanted}, not {text.strip()!r:.80}"
        ) from error
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise InputError(f"{title} has no {missing[0]!r}; {wanted}, not {text.strip()!r:.80}")
    found: dict[str, Any] = content
    return found


def first_ranks(ranks: Mapping[int, Sequence[int]], devices: int, title: str) -> dict[int, int]:
    """Return the first rank of each stage.

    Args:
        ranks: the ranks of each stage; all of them form equal pipelines.
        devices: their number.
        title: the format's name, for messages.

    Raises:
        InputError: there are more ranks than devices, ranks are not numbered from 0, a rank has
            two stages, or stages have unlike numbers of ranks.
    """
    count = sum(map(len, ranks.values()))
    if count > devices:
        raise InputError(
            f"{title} has {count_text(count, 'rank')}, and there are "
            f"{count_text(devices, 'device')}; give as many devices as ranks"
        )
    every = sorted(rank for own in ranks.values() for rank in own)
    if every != list(range(count)) or not all(ranks.values()):
        raise InputError(
            f"{title} has the ranks {', '.join(map(str, every))[:80] or 'of no stage'}; give each "
            "rank from 0 one stage, and each stage a rank"
        )
    if len({len(own) for own in ranks.values()}) > 1:
        replicas = ", ".join(str(len(own)) for own in ranks.values())
        raise InputError(
            f"the stages of {title} have {replicas} replicas, and a map describes one of several "
            "equal pipelines; give each stage as many ranks"
        )
    return {stage: own[0] for stage, own in ranks.items()}
