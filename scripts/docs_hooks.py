"""Hooks of the documentation's build: the references of verbs and settings are written from the code itself."""

import html
from typing import Any

VERBS_MARK, SETTINGS_MARK = "<!-- verbs -->", "<!-- settings -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with a mark gets every verb with its arguments and options, or every setting."""
    for mark, write in ((VERBS_MARK, verbs_as_markdown), (SETTINGS_MARK, settings_as_markdown)):
        if mark in markdown:
            markdown = markdown.replace(mark, write())
    return markdown


def settings_as_markdown() -> str:
    """Every setting: what it is, its values and its default."""
    from vramfit.settings import SETTINGS

    rows = ["| keyword | values | default | |", "|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        if setting.hidden:
            continue
        values = ", ".join(getattr(setting.value, "shown_names", ())) or setting.value.metavar or "True, False"
        told = setting.help.replace("|", "\\|")
        rows.append(f"| `{name}` | {_code(values)} | {_code(str(setting.default))} | {told} |")
    return "\n".join(rows)


def verbs_as_markdown() -> str:
    """Every verb: what it does, an example, its arguments and options as `--help` has them."""
    import typer

    from vramfit.cli.main import VERBS, make_app

    group: Any = typer.main.get_command(make_app())
    return "\n\n".join(_verb(name, group.commands[name]) for name in VERBS)


def _verb(name: str, command: Any) -> str:
    from vramfit.cli.main import find_verb

    example = find_verb(name).example
    rows = [_row(p) for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    told = " ".join((command.help or "").split())
    head = ["| option | takes | |", "|---|---|---|"]
    return "\n".join([f"## {name}", "", told, "", "```console", f"$ {example}", "```", "", *head, *rows])


def _row(parameter: Any) -> str:
    is_option = parameter.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in parameter.opts) if is_option else _code(_takes(parameter))
    takes = _code(_takes(parameter)) if is_option and not parameter.is_flag else ""
    told = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| {names} | {takes} | {told} |"


def _code(text: str) -> str:
    """Code in a table's cell; between backticks, the backslash before a bar would be shown."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _takes(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()  # type: ignore[no-any-return]
