"""Corpus of the documentation in every Python installation, with a fixed split.

The corpus has the language reference topics of `pydoc_data.topics` (the output of
`help("with")`) and the docstrings of the standard library: of source files, parsed with
`ast` without importing them, and of C modules that every build contains. A document is
a topic, or a module's docstring followed by its documented classes and functions, as in
`help`. Whole modules are long enough to fill a context of thousands of tokens.

Text repeats across documents (the topic "compound" contains the topic "with",
`_pydecimal` repeats `decimal`), and held-out text must not occur in training. So a
paragraph of at least `MIN_REPEATED` characters is kept only where it first occurs:
topics from longest to shortest, then modules.

The split hashes the subject ("json.decoder"), not the text. A document that changes
between Python versions stays on its side, so a model trained with one version can be
evaluated with another.
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

# One document in ten is held out.
HELD_OUT_ONE_IN = 10
# Shorter documents consist mainly of a heading.
MIN_CHARACTERS = 200
# Shorter paragraphs repeat legitimately ("Return self.").
MIN_REPEATED = 60
# Tests, demos, vendored wheels, codec tables, Windows installers and build settings:
# folders with little prose.
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
# Available on all platforms, with enough prose.
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
    """Return the training documents and the held-out documents, in a fixed order."""
    documents = load()
    trained = [document for document in documents if not document.held_out]
    return trained, [document for document in documents if document.held_out]


def load() -> list[Document]:
    """Return all documents of this Python installation, each paragraph once."""
    seen: set[str] = set()
    documents = []
    for subject, text in (*_topics(), *_compiled_modules(), *_source_modules()):
        text = _without_repeats(text, seen)
        if len(text) >= MIN_CHARACTERS:
            documents.append(Document(subject, text))
    return documents


def paragraphs(text: str) -> list[str]:
    """Split at blank lines; keep indentation, which has meaning in Python."""
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
    """Yield the docstrings of `thing` and its members, as `_describe` does."""
    if isinstance(thing.__doc__, str):  # a class may have a descriptor
        yield inspect.cleandoc(thing.__doc__)
    for name, member in sorted(vars(thing).items()):
        if name.endswith("hook"):  # programs replace hooks; `sys` keeps the original
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
        # Ignore warnings about invalid escapes in old sources.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ""  # templates, or syntax of other Python versions
    return "\n\n".join(_describe(tree))


def _describe(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of `node` and its members, each under its heading."""
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
            yield from _describe(child)  # conditional definitions
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
    """Remove paragraphs that are in `seen`; add the others to it."""
    kept = []
    for paragraph in paragraphs(inspect.cleandoc(text.expandtabs())):
        key = " ".join(paragraph.split())
        if len(key) >= MIN_REPEATED:
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)
