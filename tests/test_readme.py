"""The README shows a real report: this test makes it anew and compares; run as a program, it writes it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- report: (rooftile [^>]*) -->\n```text\n)(.*?)(```\n<!-- end of report -->)", re.S)


def printed(command: str) -> str:
    """What the command prints where there is no terminal: 100 columns, no colour."""
    import contextlib

    from rooftile.cli.main import run

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(command.split()[1:]) == 0
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def test_the_report_in_the_readme_is_what_the_command_prints():
    found = BLOCK.search(README.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group(3) == printed(found.group(2))
    assert max(map(len, found.group(3).splitlines())) <= 100


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    found = BLOCK.search(text)
    if found is None:
        sys.exit("README.md has no report block")
    README.write_text(BLOCK.sub(lambda m: m.group(1) + printed(m.group(2)) + m.group(4), text), encoding="utf-8")
