"""The JSON-Schema-Test-Suite: invalid instances never match, most valid ones do.

A separate suite, `schemas`: the test suite is part of the source archive of the package
`jsonschema`, which is downloaded.
"""

import json
import subprocess
import sys
import tarfile

import pytest
from support.paths import ROOT

from jkv.grammar import NoText, TooLarge, Unsupported
from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.schema.compilation import Reading
from jkv.grammar.schema.compilation import compile_schema as texts_of

VERSION = "4.26.0"
FOLDER = ROOT / "build" / "schemas"
DIALECTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# By the standard these are annotations, which do not affect validity.
ANNOTATIONS = {"content.json"}
# Minimum share of supported schemas, and of their valid instances that match: the
# others have unnamed properties, or another key order.
LEAST = {
    ("draft4", "."): (0.94, 0.65),
    ("draft7", "."): (0.95, 0.6),
    ("draft2020-12", "."): (0.92, 0.6),
    ("draft4", "optional/format"): (1, 0.45),
    ("draft7", "optional/format"): (1, 0.4),
    ("draft2020-12", "optional/format"): (1, 0.4),
    ("draft4", "optional"): (0.9, 0.8),
    ("draft7", "optional"): (0.9, 0.8),
    ("draft2020-12", "optional"): (0.85, 0.8),
}


@pytest.fixture(scope="module")
def archive():
    folder = FOLDER / f"jsonschema-{VERSION}"
    if not folder.is_dir():
        options = "--no-binary jsonschema --no-deps --quiet --dest".split()
        command = [sys.executable, "-m", "pip", "download", *options, FOLDER]
        subprocess.run([*command, f"jsonschema=={VERSION}"], check=True)
        with tarfile.open(FOLDER / f"jsonschema-{VERSION}.tar.gz") as file:
            file.extractall(FOLDER, filter="data")
    return folder / "json" / "tests"


def compile_case(case, dialect):
    """Return the automaton of a case's schema; None if it is refused or empty."""
    schema, bounds = case["schema"], Bounds(2**26)
    if isinstance(schema, dict):
        schema = {"$schema": DIALECTS[dialect], **schema}
    try:
        texts = texts_of(schema, Reading("[ ]?", 3, 2, False), bounds)
        return determinize(texts, bounds)
    except NoText:
        return None
    except (Unsupported, TooLarge) as error:
        assert " at #" in str(error) or "bytes" in str(error), case["description"]
        return None


@pytest.mark.parametrize(("dialect", "part"), LEAST)
def test_no_invalid_instance_matches(archive, dialect, part):
    num_cases = num_served = num_valid = num_texts = 0
    wrong = []
    for path in sorted((archive / dialect / part).glob("*.json")):
        if path.name in ANNOTATIONS or path.name == "refRemote.json":
            continue
        for case in json.loads(path.read_text(encoding="utf-8")):
            num_cases += 1
            automaton = compile_case(case, dialect)
            if automaton is None:
                continue
            num_served += 1
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                is_text = automaton.matches(text.encode("utf-8", "surrogatepass"))
                num_valid += test["valid"]
                num_texts += test["valid"] and is_text
                if is_text and not test["valid"]:
                    wrong.append((path.name, case["description"], text))
    assert wrong == []
    served, lost = LEAST[dialect, part]
    assert num_served >= served * num_cases, (num_served, num_cases)
    assert num_texts >= lost * num_valid, (num_texts, num_valid)
