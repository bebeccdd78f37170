"""``placer run``: place a checkpoint of transformers, and let it continue a text."""

from __future__ import annotations

import json as jsons
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from placer.cli.option_fields import Words, expanded
from placer.cli.options import Places, limits
from placer.cli.terminal import err, profiling_log, users_code
from placer.errors import InputError
from placer.schema import SuggestOptions
from placer.utils.units import count_text

if TYPE_CHECKING:
    from placer.pretrained.pretrained import Pretrained

OPTIONS = frozenset(
    {"cache", "disk_bytes", "disk_folder", "generation", "host_memory_bytes", "time_limit_s"}
)
"""The options of ``suggest`` that ``run`` has."""


@dataclass(frozen=True)
class Loading:
    """What a checkpoint is placed for, and how it is loaded and runs."""

    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="longest text in tokens, prompt included, whose keys and values have memory; by"
            " default 4096 or the model's maximum",
        ),
    ] = None
    objective: Annotated[
        Literal["latency", "generation"],
        typer.Option(
            help="the time of a pass; or of a whole text, with --prompt-tokens and --new-tokens"
            " instead of --context"
        ),
    ] = "latency"
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="compile decoding where that is faster; the first text waits for it"
        ),
    ] = False
    dtype: Annotated[
        str | None,
        typer.Option(help="of the parameters, as bfloat16; by default as in the configuration"),
    ] = None


@expanded(SuggestOptions, leave_out=frozenset(SuggestOptions.model_fields) - OPTIONS)
def run(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="a checkpoint folder of transformers, or the name of a model"
        ),
    ],
    prompt: Annotated[
        str, typer.Option(metavar="TEXT|-", help="the text to continue; - for stdin")
    ],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="maximum length of the new text; by default the whole context"
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="the prompt is a user's message in a chat")
    ] = False,
    *,
    loading: Loading,
    places: Places,
    words: Words[SuggestOptions],
    json: Annotated[
        bool, typer.Option("--json", help="print the text, the speed and the placement as JSON")
    ] = False,
) -> None:
    """Place a checkpoint on the devices, and print the text with which it continues a prompt.

    The first run measures the model's layers; later runs find the measurements in the cache. The
    last line, on stderr, tells the speed.
    """
    if max_new_tokens is not None and loading.context is not None:
        if max_new_tokens >= loading.context:
            raise InputError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in --context"
                f" {loading.context}; give a larger context, or fewer tokens"
            )
    text = sys.stdin.read() if prompt == "-" else prompt
    given: Any = [{"role": "user", "content": text}] if chat else text
    llm = _placed(path, given, loading, places, words)
    stream = llm.stream_text(given, max_new_tokens)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if not json:
            print(piece, end="", flush=True)
    if json:
        answer = {
            "text": "".join(pieces),
            "tokens": stream.tokens,
            "first_token_s": stream.first_token_s,
            "tokens_per_s": stream.tokens_per_s,
            "layer_devices": llm.placement.layer_devices,
            "resting": llm.placement.resting,
        }
        print(jsons.dumps(answer, indent=1))
    else:
        print()
    err.print(
        f"{count_text(stream.tokens, 'token')}, the first after {stream.first_token_s:.2f} s,"
        f" then {stream.tokens_per_s:.1f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )


@users_code()
def _placed(
    path: str, prompt: Any, loading: Loading, places: Places, words: Words[SuggestOptions]
) -> Pretrained:
    names = places.names()
    usable: dict[Any, int | str] = {**limits(names, places.memory)}
    options = words.read(names)
    if loading.objective == "generation" and options.generation is None:
        raise InputError(
            "--prompt-tokens and --new-tokens are missing; give them with --objective generation"
        )
    from placer.pretrained.checkpoint_folder import checkpoint_folder, tokenizer_of
    from placer.pretrained.from_pretrained import from_pretrained
    from placer.pretrained.pretrained import prompt_tokens

    folder = checkpoint_folder(path)
    if (tokenizer := tokenizer_of(folder)) is not None:
        # refuse a prompt that cannot be used before the model is measured and loaded
        prompt_tokens(tokenizer, prompt)
    with profiling_log():
        return from_pretrained(
            folder, devices=names, memory_bytes=usable or None, options=options, **vars(loading)
        )
