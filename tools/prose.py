"""Measure filler words in docstrings, comments and Markdown, per 1,000 words.

    python tools/prose.py jkv docs README.md       # rates by folder, worst sentences
    python tools/prose.py jkv --worst 40 --most 4  # fail if a folder exceeds 4

Words such as `what`, `those`, `whose`, `told` and `let` take the place of nouns and
verbs. A docstring that opens with `What`, `Whether`, `Let` or `Who` lacks its verb.
The rates find sentences to rewrite; a low rate does not show that a text reads well.
Code, doctests, tables and licenses are left out; inline code counts as one word.
"""

import argparse
import ast
import collections
import io
import itertools
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

PATTERNS = {
    "what": "what(?:ever)?",
    "those": "those",
    "who/whose": "who(?:se|m|ever)?",
    "of which": "of which",
    "told/asked/said": "told|asked|said",
    "let": "let",
}
HITS = {
    name: re.compile(rf"\b(?:{p})\b", re.IGNORECASE) for name, p in PATTERNS.items()
}
OPENING = re.compile(r"(?:What(?:ever)?|Whether|Let|Who(?:se)?)\b")
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
NOT_PROSE = re.compile(
    r"copyright|license|^\s*(?:!|noqa|type:|pyright|fmt:|ruff|pylint|mypy|-\*-)",
    re.IGNORECASE,
)
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
DOCTEST = re.compile(r"^ *>>>.*?(?:\n *(?=\n)|\Z)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
MARKUP = re.compile(
    r"<!--.*?-->|<[^<>\n]+>|\]\([^)\s]*\)|https?://\S+", re.DOTALL
)  # comments, HTML, targets of links
BLOCKS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Paragraph(NamedTuple):
    """Prose of a file."""

    line: int
    text: str
    is_docstring: bool = False


def clean(text: str) -> str:
    """Drop code blocks and markup; replace inline code by one word."""
    text = DOCTEST.sub("\n", FENCE.sub("\n", text))
    return MARKUP.sub(" ", CODE.sub("CODE", text))


def split_sentences(text: str) -> list[str]:
    """Split cleaned text at blank lines, list items and sentence ends."""
    paragraphs = re.split(r"\n\s*\n|\n\s*(?=[*+-] |\d+\. )", clean(text))
    return [
        sentence
        for each in paragraphs
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(each.split()))
        if sentence
    ]


def find_in_python(source: str) -> Iterator[Paragraph]:
    """Find docstrings, and runs of comments on lines of their own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, BLOCKS) and (text := ast.get_docstring(node)):
            yield Paragraph(node.body[0].lineno, text, is_docstring=True)
    comments: list[Paragraph] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#")
        if last == line - 1 and token.line.lstrip().startswith("#"):
            comments[-1] = Paragraph(comments[-1].line, f"{comments[-1].text}\n{text}")
        else:
            comments.append(Paragraph(line, text))
        last = line
    yield from comments


def find_in_markdown(source: str) -> Iterator[Paragraph]:
    """Find paragraphs outside code and tables; a heading is one of its own."""
    lines, is_in_code = [], False
    for line in source.splitlines():
        is_fence = line.lstrip().startswith(("```", "~~~"))
        is_in_code ^= is_fence
        skipped = is_fence or is_in_code or line.lstrip().startswith(("|", "---"))
        lines.append("" if skipped else line)
    for _, numbered in itertools.groupby(
        enumerate(lines, 1),
        key=lambda each: -each[0] if each[1].startswith("#") else bool(each[1].strip()),
    ):
        run = list(numbered)
        if run[0][1].strip():
            yield Paragraph(run[0][0], "\n".join(text for _, text in run))


class Counts:
    """Words and hits of a folder."""

    def __init__(self) -> None:
        self.words = self.openings = 0
        self.hits: collections.Counter[str] = collections.Counter()

    @property
    def rate(self) -> float:
        """Hits per 1,000 words."""
        return 1000 * sum(self.hits.values()) / max(self.words, 1)

    def add(self, paragraph: Paragraph) -> Iterator[tuple[float, str]]:
        """Count a paragraph; find its sentences with hits, and their densities."""
        self.openings += paragraph.is_docstring and bool(OPENING.match(paragraph.text))
        for sentence in split_sentences(paragraph.text):
            words = len(WORD.findall(sentence))
            hits = {name: len(each.findall(sentence)) for name, each in HITS.items()}
            self.words += words
            self.hits.update(hits)
            if words >= 8 and any(hits.values()):
                yield sum(hits.values()) / words, sentence


def main() -> int:
    """Print the rates and the worst sentences; return 1 above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--worst", type=int, default=15, help="sentences to print")
    parser.add_argument("--most", type=float, help="largest rate of a folder")
    options = parser.parse_args()
    folders: dict[str, Counts] = collections.defaultdict(Counts)
    worst = []
    for path in options.paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix not in (".py", ".md"):
                continue
            find = find_in_python if file.suffix == ".py" else find_in_markdown
            folder = path / file.relative_to(path).parent if path.is_dir() else path
            name = str(path.joinpath(*folder.relative_to(path).parts[:1]))
            for paragraph in find(file.read_text(encoding="utf-8")):
                if NOT_PROSE.search(paragraph.text[:200]):
                    continue
                for density, sentence in folders[name].add(paragraph):
                    worst.append((density, f"{file}:{paragraph.line}", sentence))
    print("words, hits per 1,000 words, docstrings without a verb first")
    for name, counts in sorted(folders.items()):
        found = ", ".join(
            f"{hit} {number}" for hit, number in counts.hits.items() if number
        )
        print(
            f"{name:32}{counts.words:8,}{counts.rate:6.1f}{counts.openings:4}  {found}"
        )
    for density, place, sentence in sorted(worst, reverse=True)[: options.worst]:
        print(f"  {density:.2f}  {place}  {sentence[:200]}")
    if options.most is None:
        return 0
    return int(
        any(each.rate > options.most or each.openings for each in folders.values())
    )


if __name__ == "__main__":
    sys.exit(main())
