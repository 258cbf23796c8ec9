"""Count the library's lines of code: without blanks, comments and docstrings.

python tests/packaging/library_lines.py [ROOT]
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

FOLDERS = ("mmspec", "pipelines", "kernels")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_lines(source: str) -> int:
    """Lines of a module that hold code: statements that are a string alone are docstrings."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            if [part.type for part in statement] != [tokenize.STRING]:
                lines |= {line for part in statement for line in range(part.start[0], part.end[0] + 1)}
            statement = []
    return len(lines)


def count_rooms(root: Path) -> Counter[str]:
    """Lines of code by folder, each file once (two folders are also linked to from the package)."""
    rooms: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                room = path.parent.relative_to(root).as_posix()
                rooms[room] += count_lines(path.read_text(encoding="utf-8"))
    return rooms


if __name__ == "__main__":
    counted = count_rooms(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[2])
    for name, lines in sorted(counted.items()):
        print(f"{lines:6} {name}")
    print(f"{sum(counted.values()):6} in all")
