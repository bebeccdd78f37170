"""A placement in the format of another engine."""

from __future__ import annotations

from placer.schema.base import FormatName, Wire


class Export(Wire):
    """A placement in the format of another engine.

    Attributes:
        format: its name.
        text: for the engine: a file's content, an option or a setting, as the format's page in the
            documentation says.
        notes: what the text cannot say and the user of the engine needs to do.
    """

    format: FormatName
    text: str
    notes: tuple[str, ...] = ()
