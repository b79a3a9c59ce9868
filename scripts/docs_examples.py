"""An extension of the reference's reader: examples at a prompt become blocks of code."""

from typing import Any

import griffe


class PromptedExamples(griffe.Extension):  # type: ignore[misc]
    """Fences what begins with `>>>` in docstrings."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for everything that is read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with its examples fenced; an example ends at an empty line."""
    lines: list[str] = []
    inside = False
    for line in [*text.split("\n"), ""]:
        if line.startswith(">>>") and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])
