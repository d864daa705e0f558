"""What an examination finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One fact.

    Attributes:
        section: under which heading it stands.
        name: what was looked at.
        text: what was found, for people.
        advice: what to do about it; "" if nothing.
        broken: whether something that ought to work does not.
        value: the fact itself, as JSON holds it; None where the text is all.
    """

    section: str
    name: str
    text: str
    advice: str = ""
    broken: bool = False
    value: Any = None

    def as_json(self) -> dict[str, Any]:
        """The finding as JSON holds it."""
        return asdict(self)
