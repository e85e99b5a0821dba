"""Text from outside (names, errors, paths) made harmless for the medium that it goes into."""

import re

CELL_CHARS = 160
"""Characters of a name or an error that a table for people shows."""
LINE_CHARS = 1000
"""Characters of a line below a table."""
DRAWN_CHARS = 36
"""Characters of a name that a picture has room for."""
_FORMULA = ("=", "+", "-", "@")
"""What a spreadsheet takes for the beginning of a formula; tabs and line breaks are gone before."""
_MARKUP = re.compile(r"[\\`*\[\]~|$]|(?<![^\W_])_|_(?![^\W_])|(?<!\w)[@#](?=\w)|(?<=\w):(?=//)|(?<=\bwww)\.")
"""What Markdown, as GitHub reads it, may take for markup, a mention, a reference or a link. Signs inside words stay."""


def visible(text: str, chars: int | None = None) -> str:
    """`text` in one line, every character that does not show itself (controls, directions, halves of pairs) as its
    escape, and of more than `chars` characters the middle left out."""
    if chars is not None and len(text) > chars:
        behind = chars // 3
        text = f"{text[: chars - behind - 1]}…{text[-behind:]}"
    if text.isprintable():
        return text
    return "".join(_shown(char) for char in text)


def visible_lines(text: str, chars: int | None = None) -> str:
    """The same with its line breaks."""
    if chars is not None and len(text) > chars:
        text = f"{text[:chars]}…"
    return "\n".join(visible(line) for line in text.splitlines())


def for_markdown(text: str) -> str:
    """`text` as Markdown that shows it letter by letter."""
    plain = visible(text, LINE_CHARS).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};" if found[0] in "@#:." else f"\\{found[0]}", plain)


def for_spreadsheet(text: str) -> str:
    """`text` as a cell that no spreadsheet computes."""
    plain = visible(text)
    return f"'{plain}" if plain.lstrip().startswith(_FORMULA) else plain


def for_plot(text: str, chars: int = DRAWN_CHARS) -> str:
    """`text` as matplotlib draws it letter by letter: a pair of dollar signs would make it a formula."""
    return visible(text, chars).replace("$", r"\$")


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if char.isspace() and char not in "\x1c\x1d\x1e\x1f\u2028\u2029":
        return " "
    return char.encode("unicode_escape").decode("ascii")
