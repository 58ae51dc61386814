"""Writes the table of keys in docs/from_deepspeed.md: ``python docs/deepspeed_keys.py``."""

from __future__ import annotations

import pathlib
import sys

PAGE = pathlib.Path(__file__).with_name("from_deepspeed.md")
HEAD = "## Every key\n"
INTRODUCTION = """
`honoured`: it sets what the text names. `replaced`: results are the same without it, and one warning names the
replacement. `error`: results would differ without it. Values that have no effect (`false`, `"none"`, a section that is
not enabled) are silent; keys that DeepSpeed does not know are an error, with the nearest one that it knows.
`python docs/deepspeed_keys.py` writes this section; do not edit it.
"""


def section() -> str:
    """The section."""
    from graphzero.plugins.deepspeed.keys import ALIASES, KEYS

    rows = [f"| `{key.path}` | {key.way} | {key.text} |" for key in KEYS]
    names = [f"* `{old}` is read as `{new}`" for old, new in ALIASES.items()]
    head = [HEAD + INTRODUCTION, "| key | here | setting, or replacement |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", "Other names of these:", "", *names, ""])


def refreshed(page: str) -> str:
    """The page with the section as it is by now."""
    above, _, below = page.partition(HEAD)
    _, mark, after = below.partition("\n## ")
    return f"{above}{section()}{mark}{after}"


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1]))
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
