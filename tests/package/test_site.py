"""The pages: code runs, public names are listed, the README is self-contained."""

import doctest
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from support.jax_versions import with_further
from support.paths import ROOT

import jkv
from jkv import decoding, grammar, logits_processors, serving, trees

pytestmark = pytest.mark.one_end

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
MOST_WORDS = 1200


def find_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_tutorial_runs_and_equals_the_dense_model() -> None:
    """Run each block in order; the blocks compare with the dense model themselves."""
    pytest.importorskip("flax")
    blocks = find_blocks(TUTORIAL)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"tutorial.md, block {number}", "exec"), names)
    compared = sum(block.count("assert_allclose(") for block in blocks)
    assert compared == 4  # one step, a prompt, a scan, Flax NNX
    # Other weights give other logits, so the comparison can fail.
    worse = dict(names["params"], embedding=names["params"]["embedding"] * 1.01)
    dense = names["dense"](worse, names["tokens"][-1], names["dense_cache"], 5)[0]
    assert np.abs(dense - names["expected"]).max() > 1e-2


def test_the_port_of_the_readme_equals_the_tutorials() -> None:
    before, after, usage = find_blocks(README)
    for name, block in (("before", before), ("after", after)):
        assert f"<!-- {name} -->\n```python\n{block}```" in TUTORIAL
    # The next part is only traced, on a cache of 4 GB.
    names: dict[str, object] = {}
    exec("\n".join(find_blocks(TUTORIAL)[:4]), names)
    names["tokens"] = np.array([1, 2])
    jax.eval_shape(lambda: exec(usage, names))
    assert names["logits"].shape == (2, 64)


# A trainer's packages need a separate environment, which tests its page (`make tunix`).
# Replicas are started in a shell.
WITHOUT = {"tunix-rollouts", "replicas"}
PAGES = sorted({path.stem for path in (DOCS / "how-to").glob("*.md")} - WITHOUT)
# These compile whole decoding loops, which the tests of their packages also have.
OF_LOOPS = ("multi-turn-chat", "determinism", "weight-updates", "parallel-sampling")
OF_LOOPS += ("sampling-parameters", "tree-search", "serving-engine", "hybrid-models")
OF_LOOPS += ("speculative-decoding", "logits-processors", "kv-cache-offloading")
OF_LOOPS += ("trajectory-trees", "sliding-window", "beam-search", "continuous-batching")
OF_LOOPS += ("architectures", "under-another-model", "kv-cache-compression")


@pytest.mark.parametrize("name", with_further(PAGES, *OF_LOOPS))
def test_the_examples_of_the_how_to_pages_run(name: str) -> None:
    page = DOCS / "how-to" / f"{name}.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted and not failed


@pytest.mark.parametrize("name", ["kernel", "questions"])
def test_the_examples_of_other_pages_run(name: str) -> None:
    failed, attempted = doctest.testfile(
        str(DOCS / f"{name}.md"), module_relative=False
    )
    assert attempted and not failed


def test_the_first_block_of_every_page_runs() -> None:
    """The block is a session tested above, a tested program, or a shell command."""
    programs = {"quickstart", "tutorial"}
    for page in DOCS.rglob("*.md"):
        first = re.search(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        if first is None or page.stem in programs or first[1] in {"", "sh", "bash"}:
            continue
        assert first[2].startswith(">>> "), page


def test_the_reference_has_every_public_name_once() -> None:
    pages = [path.read_text() for path in (DOCS / "reference").glob("*.md")]
    named = re.findall(r"^::: jkv\.([\w.]+)$", "\n".join(pages), re.MULTILINE)
    of_decoding = {f"decoding.{n}" for n in decoding.__all__ if n not in jkv.__all__}
    of_serving = {f"serving.{name}" for name in serving.__all__}
    of_processors = {
        f"logits_processors.{n}"
        for n in logits_processors.__all__
        if n not in jkv.__all__
    }
    of_grammar = {f"grammar.{name}" for name in grammar.__all__}
    of_trees = {f"trees.{name}" for name in trees.__all__ if name not in jkv.__all__}
    others = of_decoding | of_serving | of_processors | of_grammar | of_trees
    others |= {"integrations.tunix.JkvRollout"}
    assert sorted(named) == sorted({*jkv.__all__, *others})
    _, _, table = (DOCS / "reference" / "index.md").read_text().partition("All names\n")
    linked = re.findall(r"^\| \[.+\]\(([\w-]+\.md)\)", table, re.MULTILINE)
    assert sorted(["index.md", *linked]) == sorted(
        p.name for p in (DOCS / "reference").glob("*.md")
    )


def test_experimental_names_exist() -> None:
    """Every name in the table's first column, of `jkv`, a package or a class."""
    page = (DOCS / "promises.md").read_text()
    table = page.partition("## Experimental names")[2].partition("\nPromised")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    names = re.findall(r"`(?:jkv\.)?([\w.]+)", " ".join(rows))
    places = (
        jkv,
        serving,
        serving.Engine,
        serving.Completion,
        trees,
        logits_processors,
    )
    assert len(names) > 20
    for name in {*names} - {"pretrained", "served", "integrations"}:
        room, _, last = name.rpartition(".")
        owners = [getattr(place, room, None) for place in places] if room else places
        fields = [getattr(owner, "__dataclass_fields__", {}) for owner in owners]
        found = any(hasattr(owner, last) for owner in owners)
        assert found or any(last in names for names in fields), name


def test_every_page_is_in_the_navigation() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]

    def pages(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        entries = nav.values() if isinstance(nav, dict) else nav
        return [page for entry in entries for page in pages(entry)]

    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(pages(settings["nav"])) == sorted(written)
    # A site with web fonts needs the network.
    assert settings["theme"]["font"] is False


# Search terms, and the page that each should find first.
SEARCHES = {
    "speculative decoding": "speculative-decoding",
    "continuous batching": "continuous-batching",
    "structured output": "structured-output",
    "constrained decoding": "structured-output",
    "offload": "kv-cache-offloading",
    "prefix caching": "prefix-caching",
    "beam search": "beam-search",
    "sliding window": "sliding-window",
    "quantization": "kv-cache-quantization",
    "kv cache compression": "kv-cache-compression",
    "tunix": "tunix-rollouts",
    "openai": "openai-server",
}


def test_searches_for_field_terms_find_their_pages(
    tmp_path: pathlib.Path,
) -> None:
    """The search uses Zensical's index: titles before texts, words by prefix."""
    zensical = pathlib.Path(sys.executable).with_name("zensical")
    if not zensical.exists():
        pytest.skip("the builder of the site is not installed here")
    shutil.copytree(DOCS, tmp_path / "docs")
    # Without the reference, which takes longer than all other pages.
    settings = (ROOT / "zensical.toml").read_text()
    settings, _, _ = settings.partition("[project.plugins.mkdocstrings")
    (tmp_path / "zensical.toml").write_text(settings)
    subprocess.run([zensical, "build"], cwd=tmp_path, check=True, capture_output=True)
    index = json.loads((tmp_path / "site" / "search.json").read_text())
    pages: dict[str, tuple[list[str], list[str]]] = {}
    for item in index["items"]:
        titles, texts = pages.setdefault(item["location"].partition("#")[0], ([], []))
        titles += find_words(item["title"]) * (3 if item["level"] == 1 else 1)
        texts += find_words(item["text"])
    for query, expected in SEARCHES.items():
        found = max(pages, key=lambda page: score_page(query, *pages[page]))
        assert found == f"how-to/{expected}.html", query
    absent = {page: score_page("zyzzyva", *pages[page]) for page in pages}
    assert {*absent.values()} == {0}


def find_words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"<[^>]+>", " ", text).lower())


def score_page(query: str, titles: list[str], texts: list[str]) -> float:
    """Return a page's score: word counts, weighted by title and page length."""
    counts = [
        sum(10 * word.startswith(each) for word in titles)
        + sum(word.startswith(each) for word in texts)
        for each in query.split()
    ]
    if not all(counts):
        return 0
    length = 0.25 + 0.75 * len(texts) / 1500
    return sum(count / (count + 1.2 * length) for count in counts)


def test_blocks_are_copied_without_prompts() -> None:
    """The theme copies visible text; the page's style hides prompts and output."""
    settings = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    styles = "".join((DOCS / name).read_text() for name in settings["extra_css"])
    assert "[data-md-copying] .gp" in styles and "[data-md-copying] .go" in styles
    assert '[data-md-color-scheme="slate"]' in styles  # pictures on a dark page
    theme = importlib.util.find_spec("zensical")
    if theme is None:
        pytest.skip("the theme is not installed here")
    scripts = pathlib.Path(theme.origin).parent / "templates" / "assets"
    bundles = [*scripts.glob("javascripts/bundle*.js")]
    assert any("data-md-copying" in path.read_text() for path in bundles)


def test_the_readme_is_short_and_self_contained() -> None:
    """On a package index there are no relative links or pictures."""
    assert len(README.split()) <= MOST_WORDS
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", README)
    assert all(any(t.startswith("https://") for t in pair) for pair in targets)
    for path in re.findall(r"`((?:docs|examples|tests)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path


def test_the_readme_lists_untimed_gpus() -> None:
    (paragraph,) = (p for p in README.split("\n\n") if "written for AMD GPUs" in p)
    assert "on AMD GPUs only compiled so far" in paragraph


def test_the_package_names_no_unregistered_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for address in project.get("urls", {}).values():
        assert address.startswith("https://"), address


def test_plots_equal_the_results() -> None:
    pytest.importorskip("matplotlib")
    path = ROOT / "benchmarks" / "plots.py"
    spec = importlib.util.spec_from_file_location("plots", path)
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    page = (DOCS / "measured.md").read_text()
    for name in plots.PICTURES:
        assert f"(measured/{name}.svg)" in page
        drawn = (DOCS / "measured" / f"{name}.svg").read_text()
        assert f"results {plots.digest(name)}" in drawn, (
            f"{name}.json has changed: run python benchmarks/plots.py"
        )
