"""The pages: their code runs, every public name is there, the README stands alone."""

import doctest
import importlib.util
import pathlib
import re
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
    """Each block in order; they compare with the dense original themselves."""
    pytest.importorskip("flax")
    blocks = find_blocks(TUTORIAL)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"tutorial.md, block {number}", "exec"), names)
    compared = sum(block.count("assert_allclose(") for block in blocks)
    assert compared == 4  # one step, a prompt, a scan, Flax NNX
    # The comparison can fail: other weights give other logits.
    worse = dict(names["params"], embedding=names["params"]["embedding"] * 1.01)
    dense = names["dense"](worse, names["tokens"][-1], names["dense_cache"], 5)[0]
    assert np.abs(dense - names["expected"]).max() > 1e-2


def test_the_port_of_the_readme_is_the_tutorials() -> None:
    before, after, usage = find_blocks(README)
    for name, block in (("before", before), ("after", after)):
        assert f"<!-- {name} -->\n```python\n{block}```" in TUTORIAL
    assert find_blocks((DOCS / "index.md").read_text()) == [before, after, usage]
    # The next part is traced: it opens, steps, forks and frees on a cache of 4 GB.
    names: dict[str, object] = {}
    exec("\n".join(find_blocks(TUTORIAL)[:4]), names)
    names["tokens"] = np.array([1, 2])
    jax.eval_shape(lambda: exec(usage, names))
    assert names["logits"].shape == (2, 64)


# The packages for a trainer are in an environment of their own, and so is the test of
# its page (`make tunix`). Replicas are started in a shell.
WITHOUT = {"tunix-rollouts", "replicas"}
PAGES = sorted({path.stem for path in (DOCS / "how-to").glob("*.md")} - WITHOUT)
# These compile whole loops of decoding, which the tests of their rooms have, too.
OF_LOOPS = ("multi-turn-chat", "determinism", "weight-updates", "parallel-sampling")
OF_LOOPS += ("sampling-parameters", "tree-search", "serving-engine", "hybrid-models")
OF_LOOPS += ("speculative-decoding", "logits-processors", "kv-cache-offloading")
OF_LOOPS += ("trajectory-trees", "sliding-window")


@pytest.mark.parametrize("name", with_further(PAGES, *OF_LOOPS))
def test_the_examples_of_the_how_to_pages_run(name: str) -> None:
    page = DOCS / "how-to" / f"{name}.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted and not failed


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
    """Every name of the table's first column, of `jkv`, a room or a class of it."""
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
    # A site that asks for fonts needs the network.
    assert settings["theme"]["font"] is False


def test_blocks_are_copied_without_prompts() -> None:
    """The theme reads the visible text; the page's style hides prompts and output."""
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


def test_the_readme_is_short_and_stands_alone() -> None:
    """As a package index shows it: no link, and no picture, that only a clone has."""
    assert len(README.split()) <= MOST_WORDS
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", README)
    assert all(any(t.startswith("https://") for t in pair) for pair in targets)
    for path in re.findall(r"`((?:docs|examples|tests)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path


def test_the_readme_lists_untimed_gpus() -> None:
    (paragraph,) = (p for p in README.split("\n\n") if "written for AMD GPUs" in p)
    assert "on AMD GPUs only compiled so far" in paragraph


def test_the_package_names_no_address_that_it_has_not() -> None:
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
