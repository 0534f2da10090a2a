"""The text every Python installation carries, as documents with a fixed split.

The language reference topics of `pydoc_data.topics` (what `help("with")` prints), and
the docstrings of the standard library: of its source files, read with `ast` so that
nothing is imported, and of the C modules in every build. A topic is one document, and
so is a module: its docstring, then each documented class and function, much as `help`
shows them. Whole modules make documents long enough to fill a context of thousands of
tokens.

The same text appears many times (the topic "compound" contains the topic "with",
`_pydecimal` repeats `decimal`), and a held-out document must not have been trained on
under another name. So a paragraph of `MIN_REPEATED` characters or more is kept where it
first occurs and nowhere else: topics from the longest to the shortest, then modules.

The split hashes the subject ("json.decoder"), not the text: a document edited between
two Python versions stays on its side, so a model trained with one version can be
evaluated with another.

    PYTHONPATH=. python examples/corpus.py

prints the number and the size of the documents on each side.
"""

import ast
import hashlib
import importlib
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from generating.arguments import Parser
from generating.exiting import errors_in_one_line

# One document in ten is held out.
HELD_OUT_ONE_IN = 10
# Shorter documents are mostly a heading.
MIN_CHARACTERS = 200
# Shorter paragraphs repeat because the language does ("Return self.").
MIN_REPEATED = 60
# Tests, demonstrations, vendored wheels, tables of codecs and Windows installers, and
# the configuration of this very build: little prose in any of them.
SKIPPED_FOLDERS = {
    "__phello__",
    "encodings",
    "ensurepip",
    "idle_test",
    "idlelib",
    "msilib",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# The same on every platform, and enough prose to be worth importing.
COMPILED_MODULES = """
    builtins sys itertools math cmath time gc array marshal _io _thread _datetime
    _collections _functools _operator _csv _pickle _random _struct _weakref
    _contextvars _signal
""".split()


class Document(NamedTuple):
    subject: str  # "json.decoder", "with"
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.subject.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def split() -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and the documents held out, in a fixed order."""
    documents = load()
    trained = [document for document in documents if not document.held_out]
    return trained, [document for document in documents if document.held_out]


def load() -> list[Document]:
    """Return every document of this Python installation, each paragraph once."""
    seen: set[str] = set()
    documents = []
    for subject, text in (*_topics(), *_compiled_modules(), *_source_modules()):
        text = _without_repeats(text, seen)
        if len(text) >= MIN_CHARACTERS:
            documents.append(Document(subject, text))
    return documents


def paragraphs(text: str) -> list[str]:
    """Split at blank lines, keeping the indentation that carries the meaning."""
    return [p.strip("\n") for p in text.split("\n\n") if p.strip()]


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    longest_first = sorted(topics.items(), key=lambda item: (-len(item[1]), item[0]))
    for subject, text in longest_first:
        yield Document(subject, text)


def _compiled_modules() -> Iterator[Document]:
    for name in COMPILED_MODULES:
        module = importlib.import_module(name)
        yield Document(name, "\n\n".join(_describe_object(module)))


def _describe_object(thing: object) -> Iterator[str]:
    """Yield the docstring of `thing` and of its members, as `_describe` does."""
    if isinstance(thing.__doc__, str):  # a class may keep a descriptor there
        yield inspect.cleandoc(thing.__doc__)
    for name, member in sorted(vars(thing).items()):
        if name.endswith("hook"):  # programs replace these, and `sys` keeps the first
            member = vars(thing).get(f"__{name}__", member)
        if inspect.isclass(member):
            heading, inner = f"class {name}", _describe_object(member)
        elif inspect.isroutine(member) and isinstance(member.__doc__, str):
            signature = getattr(member, "__text_signature__", None) or ""
            heading = name + signature.replace("$module, ", "").replace("$", "")
            inner = iter([inspect.cleandoc(member.__doc__)])
        else:
            continue
        if body := "\n\n".join(inner):
            yield heading + "\n" + textwrap.indent(body, "    ")


def _source_modules() -> Iterator[Document]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts[:-1]) or any("-" in p for p in parts):
            continue
        subject = ".".join(parts).removesuffix(".__init__")
        yield Document(subject, _describe_module(path))


def _describe_module(path: Path) -> str:
    with warnings.catch_warnings():
        # Old escapes in old sources are not ours to report.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ""  # templates and fixtures that are not Python of this version
    return "\n\n".join(_describe(tree))


def _describe(node: ast.AST) -> Iterator[str]:
    """Yield the docstring of `node` and of its members, each under its heading."""
    if isinstance(node, ast.Module):
        if docstring := ast.get_docstring(node):
            yield docstring
    for child in ast.iter_child_nodes(node):
        inner: list[str] = []
        if isinstance(child, ast.ClassDef):
            inner = list(_describe(child))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            pass
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _describe(child)  # definitions under a condition
            continue
        else:
            continue
        docstring = ast.get_docstring(child)
        if docstring or inner:
            body = "\n\n".join(filter(None, [docstring, *inner]))
            yield _heading(child) + "\n" + textwrap.indent(body, "    ")


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if not isinstance(node, ast.ClassDef):
        # `unparse` of the arguments alone keeps long signatures on one line.
        return f"{node.name}({ast.unparse(node.args)})"
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    return f"class {node.name}{bases}"


def _without_repeats(text: str, seen: set[str]) -> str:
    """Drop the paragraphs of `text` that are in `seen`, and add the others to it."""
    kept = []
    for paragraph in paragraphs(inspect.cleandoc(text.expandtabs())):
        key = " ".join(paragraph.split())
        if len(key) >= MIN_REPEATED:
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def main() -> None:
    Parser(__doc__).parse_args()
    for side, documents in zip(("trained", "held out"), split(), strict=True):
        size = sum(len(document.text.encode()) for document in documents)
        print(f"{side}: {len(documents)} documents, {size:,} bytes")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
