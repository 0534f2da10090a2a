"""Support matrix: evidence for each feature, backend and dtype.

    python3 tools/matrix.py                     # write docs/support.md
    python3 tools/matrix.py --reports FOLDER    # check that the rows' tests passed

`JKV_REPORTS=FOLDER tools/run.py test` writes the reports for the second form, one per
suite: `.ci/run` does both. Tests check that the page is up to date, that each test
exists, and that results contain the rows' entries. Only Python's standard library is
required.
"""

import argparse
import json
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"

BACKENDS = ("CPU", "kernel, interpreted", "CUDA", "ROCm")
WORDS = {
    "tested": "run on that backend and compared, by the tests named",
    "timed": "run and timed on an NVIDIA H100, beside others and with its results kept",
    "compiled": "compiled to machine code for GPUs of that kind, not run",
    "refused": "an error that says what to change, held by a test",
    "plain": "no kernel of its own: XLA's path, as on the CPU; nothing was run there",
    "-": "does not apply",
}


class Result(NamedTuple):
    """A required entry of a file in benchmarks/results."""

    file: str  # without folder and suffix
    fields: Mapping[str, Any]  # all or some fields of the entry


class Row(NamedTuple):
    """A feature with dtypes, and its evidence on each of `BACKENDS`."""

    feature: str
    dtypes: str
    words: tuple[str, str, str, str]  # one of `WORDS` per backend
    tests: tuple[str, ...]  # as file::test, without folder
    results: tuple[Result, ...] = ()


def timed(workload: str) -> Result:
    """Return the entry of a call timed on a GPU."""
    return Result("gpu", {"workload": workload})


def code(elements: str, queries: str = "bfloat16", target: str = "gfx942") -> Result:
    """Return the entry of a kernel's inspected machine code."""
    fields = {"elements": elements, "queries": queries, "target": target}
    return Result("kernel_code", fields)


def gradient(dtype: str, target: str) -> Result:
    """Return the entry of a gradient kernel's inspected machine code."""
    kernel = "jkv_query_gradients"
    fields = {"elements": dtype, "queries": dtype, "target": target, "kernel": kernel}
    return Result("kernel_code", fields)


def step(name: str) -> Result:
    """Return the entry of a whole step compiled for an MI300X."""
    return Result("rocm_compile", {"step": name})


PLAIN_LOOP = "test_attention.py::test_equals_the_plain_loop"
KERNEL_LOOP = "test_pallas.py::test_equals_the_plain_loop"
SPILLS = "test_kernel_machine_code.py::test_no_kernel_spills"
DERIVATIVE_SPILLS = "test_kernel_machine_code.py::test_no_derivative_spills"
BIT_GRADIENTS = (
    "test_kernel_derivative.py::test_raw_bits_have_gradients_of_queries_only"
)
RUN = ("tested", "tested", "timed", "compiled")
TABLES: dict[str, tuple[Row, ...]] = {
    "Attention": (
        Row(
            "decoding, prompts in chunks, mixed steps",
            "bfloat16",
            RUN,
            (PLAIN_LOOP, KERNEL_LOOP, "test_attention.py::test_half_precision"),
            (timed("64 x 8,192, bfloat16"), code("bfloat16")),
        ),
        Row(
            "the same",
            "float16",
            ("tested", "tested", "compiled", "compiled"),
            ("test_attention.py::test_half_precision", KERNEL_LOOP, SPILLS),
            (code("float16", "float16", "sm_90"), code("float16", "float16")),
        ),
        Row(
            "the same",
            "float32",
            RUN,
            (PLAIN_LOOP, KERNEL_LOOP),
            (timed("64 x 8,192, float32"), code("float32", "float32")),
        ),
        Row(
            "the same, with scales",
            "int8",
            RUN,
            ("test_attention.py::test_8_bit_pools_equal_decoded_pools", KERNEL_LOOP),
            (timed("64 x 8,192, int8"), code("int8")),
        ),
        Row(
            "the same, with scales",
            "fp8",
            RUN,
            (
                "test_attention.py::test_8_bit_pools_equal_decoded_pools",
                "test_kernel_conversion.py::test_attention_reads_every_code",
            ),
            (timed("64 x 8,192, fp8"), code("float8_e4m3fn")),
        ),
        Row(
            "the same, with scales, two elements in a byte",
            "int4",
            ("tested", "tested", "compiled", "compiled"),
            (
                "test_packed.py::test_attention_equals_float32_over_decoded_rows",
                "test_pallas.py::test_equals_the_plain_loop",
                "test_kernel_machine_code.py::test_no_kernel_spills",
            ),
            (code("int4"),),
        ),
        Row(
            "keys that hold the values (latent)",
            "bfloat16, int8, fp8",
            RUN,
            ("test_pallas.py::test_a_latent_cache_equals_separate_values",),
            (
                timed("64 x 8,192, bfloat16, latent"),
                timed("64 x 8,192, int8, latent"),
                step("latent, 128 heads"),
            ),
        ),
        Row(
            "windows, sinks, soft cap, log-sum-exp",
            "all",
            ("tested", "tested", "compiled", "compiled"),
            (
                PLAIN_LOOP,
                KERNEL_LOOP,
                "test_attention.py::test_nan_outside_the_window_has_no_effect",
                SPILLS,
            ),
            (Result("kernel_code", {"options": "all", "target": "sm_90"}),)
            + (Result("kernel_code", {"options": "all", "target": "gfx942"}),),
        ),
        Row(
            "masks within a step: spans, trees, read-only rows",
            "all",
            ("tested", "tested", "compiled", "compiled"),
            (
                "test_masks.py::test_masks_agree_with_dense_attention",
                "test_masks.py::test_every_backend_serves_masks",
                "test_kernel_machine_code.py::test_no_masked_kernel_spills",
            ),
        ),
        Row(
            "gradients of queries, sinks and pools",
            "float32, float16",
            ("tested", "tested", "compiled", "compiled"),
            (
                "test_gradients.py::test_gradients_equal_the_reference",
                "test_kernel_derivative.py::test_gradients_equal_the_plain_path",
                DERIVATIVE_SPILLS,
            ),
            (gradient("float16", "sm_90"), gradient("float32", "gfx942")),
        ),
        Row(
            "gradients of queries and sinks, pools kept as bits (they get none)",
            "bfloat16",
            ("tested", "tested", "compiled", "compiled"),
            (
                "test_gradients.py::test_raw_bits_have_gradients_of_queries_and_sinks",
                BIT_GRADIENTS,
                DERIVATIVE_SPILLS,
            ),
            (gradient("bfloat16", "sm_90"), gradient("bfloat16", "gfx942")),
        ),
        Row(
            "the same",
            "int8, fp8",
            ("tested", "tested", "plain", "plain"),
            (BIT_GRADIENTS,),
        ),
        Row(
            "the kernel by name: head dims off 8, off 16 above 240, or above 576",
            "all",
            ("-", "refused", "refused", "refused"),
            ("test_pallas.py::test_refusals_report_the_reason",),
        ),
        Row(
            "the kernel by name, on a GPU without a tile for the dtype",
            "float32",
            ("-", "-", "refused", "refused"),
            ("test_kernel_lowering.py::test_a_forced_kernel_raises_if_unsupported",),
        ),
        Row(
            "an exported program for several platforms",
            "bfloat16",
            ("tested", "-", "compiled", "compiled"),
            ("test_kernel_lowering.py::test_a_step_is_exported_for_three_platforms",),
            (code("bfloat16", target="sm_90"), code("bfloat16")),
        ),
    ),
    "The cache": (
        Row(
            "all verbs, against a plain cache in Python",
            "all",
            ("tested", "-", "plain", "plain"),
            ("test_random_operations.py::test_random_operations",),
        ),
        Row(
            "a donated step in place",
            "all",
            ("tested", "-", "timed", "compiled"),
            ("test_in_place.py::test_a_donated_step_updates_in_place",),
            (
                Result("gpu", {"what": "step", "layers": 32}),
                step("llama-8b, unrolled"),
                step("llama-8b, int8"),
                step("fp8"),
            ),
        ),
        Row(
            "prefixes found again",
            "all",
            ("tested", "-", "plain", "plain"),
            ("test_random_reuse.py::test_random_reuse",),
        ),
        Row(
            "windows that give blocks back, groups of layers",
            "all",
            ("tested", "-", "plain", "compiled"),
            (
                "test_windows.py::test_rows_attend_to_sinks_and_window_like_a_dense_model",
                "test_in_place.py::test_a_donated_step_in_groups_updates_in_place",
            ),
            (step("llama-8b, sliding window"),),
        ),
        Row(
            "pruning, also by layer and head",
            "all",
            ("tested", "-", "plain", "plain"),
            (
                "test_random_pruning.py::test_pruned_sequences_keep_the_selected_tokens",
                "test_observing.py::test_verbs_keep_drop_and_copy_queries",
            ),
        ),
        Row(
            "overwriting and scrubbing",
            "all",
            ("tested", "-", "plain", "plain"),
            (
                "test_random_pruning.py::test_pruned_sequences_are_never_found_as_prefixes",
                "test_random_pruning.py::test_groups_are_pruned_together",
            ),
        ),
        Row(
            "layers with a state",
            "float32, bfloat16",
            ("tested", "-", "plain", "plain"),
            (
                "test_state_table.py::test_cells",
                "test_states_in_place.py::test_a_donated_step_copies_no_states",
            ),
        ),
        Row(
            "to the host and to files",
            "all",
            ("tested", "-", "plain", "plain"),
            (
                "test_swapping.py::test_one_of_many",
                "test_saving.py::test_is_restored_bit_identical",
            ),
        ),
        Row(
            "several devices: heads, blocks, pools over a mesh",
            "all",
            ("tested", "tested", "plain", "compiled"),
            (
                "test_donated_steps.py::test_a_donated_step_equals_one_device",
                "test_kernel.py::test_the_interpreted_kernel_equals_the_plain_path",
            ),
            (step("llama-8b, heads on 8 cards"), step("llama-8b, blocks on 8 cards")),
        ),
    ),
    "Generation": (
        Row(
            "generate: a queue in one jit",
            "float32, bfloat16",
            ("tested", "-", "plain", "plain"),
            (
                "test_queue.py::test_random_calls_equal_the_plain_queue",
                "test_generation.py::test_greedy_equals_eager_loop_and_dense_model",
            ),
        ),
        Row(
            "sampling",
            "float32 logits",
            ("tested", "-", "plain", "plain"),
            ("test_filters_parity.py::test_filters_equal_hugging_face",),
        ),
        Row(
            "draft tokens: prompt lookup, draft model",
            "float32",
            ("tested", "-", "plain", "plain"),
            (
                "test_speculation.py::test_speculation_preserves_sequences_in_every_pool",
                "test_draft_model.py::test_greedy_tokens_equal_the_target_in_every_pool",
            ),
        ),
        Row(
            "beams",
            "float32",
            ("tested", "-", "plain", "plain"),
            ("test_beam_search.py::test_beams_equal_plain_python",),
        ),
        Row(
            "scores of sequences and trees, with gradients",
            "float32",
            ("tested", "-", "plain", "plain"),
            (
                "test_scoring.py::test_scores_and_gradients_equal_a_dense_model",
                "test_trees.py::test_random_trees_equal_a_dense_model",
            ),
        ),
        Row(
            "second derivatives of scores",
            "float32",
            ("refused", "refused", "refused", "refused"),
            ("test_scoring.py::test_higher_derivatives_raise",),
        ),
        Row(
            "pressed prompts and rolling contexts",
            "float32",
            ("tested", "-", "plain", "plain"),
            (
                "test_shortening.py::test_pressed_prompts_keep_the_best_tokens",
                "test_press.py::test_rules_keep_the_tokens_of_kvpress",
            ),
        ),
        Row(
            "the same bits (exact)",
            "float32",
            ("tested", "-", "plain", "plain"),
            ("test_exact.py::test_results_do_not_depend_on_order_and_number",),
        ),
        Row(
            "logits processors and grammars",
            "float32 logits",
            ("tested", "-", "plain", "plain"),
            ("test_against_llguidance.py::test_masks_of_schemas",),
        ),
        Row(
            "the engine",
            "float32",
            ("tested", "-", "plain", "plain"),
            ("test_engine.py::test_random_requests_equal_their_solo_runs",),
        ),
    ),
}
HEAD = """# Support

Evidence for each feature, by backend and dtype. `tools/matrix.py` generates this page;
its rows name the tests and results. `.ci/run` fails if one of these tests did not pass.

| word | meaning |
|---|---|
"""


def all_rows() -> Iterator[Row]:
    """Yield the rows of all tables."""
    for rows in TABLES.values():
        yield from rows


def write_page() -> str:
    """Return the page as Markdown."""
    words = "".join(f"| {word} | {meaning} |\n" for word, meaning in WORDS.items())
    parts = [HEAD + words]
    for title, rows in TABLES.items():
        head = ["feature", "dtypes", *BACKENDS, "shown by"]
        lines = [head, ["---"] * len(head)]
        for row in rows:
            shown = [f"`{test}`" for test in row.tests]
            shown += sorted({f"`results/{each.file}.json`" for each in row.results})
            lines.append([row.feature, row.dtypes, *row.words, ", ".join(shown)])
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        parts.append(f"\n## {title}\n\n{table}")
    return "".join(parts)


def find_missing_tests() -> list[str]:
    """Return the tests of rows that do not exist."""
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = path.read_text(encoding="utf-8")
    missing = []
    for name in dict.fromkeys(test for row in all_rows() for test in row.tests):
        file, _, test = name.partition("::")
        if not re.search(rf"^ *def {test}\(", files.get(file, ""), re.MULTILINE):
            missing.append(name)
    return missing


def has_entry(value: Any, fields: Mapping[str, Any]) -> bool:
    """Return True if an object within a JSON value has all of `fields`."""
    if isinstance(value, list):
        return any(has_entry(each, fields) for each in value)
    if not isinstance(value, dict):
        return False
    if all(value.get(name) == expected for name, expected in fields.items()):
        return True
    return any(has_entry(each, fields) for each in value.values())


def find_missing_results() -> list[Result]:
    """Return the results of rows that do not exist."""
    folder = ROOT / "benchmarks" / "results"
    return [
        result
        for row in all_rows()
        for result in row.results
        if not has_entry(
            json.loads((folder / f"{result.file}.json").read_text()), result.fields
        )
    ]


def read_outcomes(folder: pathlib.Path) -> tuple[set[str], set[str]]:
    """Return the passed and the failed tests of JUnit reports."""
    passed, failed = set(), set()
    for path in folder.glob("*.xml"):
        for case in ElementTree.parse(path).iter("testcase"):
            # tests.verbs.test_windows.TestSinks, or without the class.
            module = re.search(r"\btest_\w+", case.get("classname", ""))
            test = case.get("name", "").partition("[")[0]
            if module is None:
                continue
            name = f"{module[0]}.py::{test}"
            wrong = any(case.find(tag) is not None for tag in ("failure", "error"))
            if wrong:
                failed.add(name)
            elif case.find("skipped") is None:
                passed.add(name)
    return passed, failed


def say_faults(folder: pathlib.Path) -> list[str]:
    """Return a line for each row's test that passed in no suite."""
    passed, failed = read_outcomes(folder)
    faults = []
    for row in all_rows():
        for test in row.tests:
            if test in failed:
                faults.append(f"{row.feature}, {row.dtypes}: {test} failed")
            elif test not in passed:
                faults.append(f"{row.feature}, {row.dtypes}: {test} was not run")
    return faults


def main() -> int:
    """Write the page, or check that the tests of its rows passed."""
    parser = argparse.ArgumentParser(prog="tools/matrix.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--reports", type=pathlib.Path, help="a folder of JUnit's XML")
    options = parser.parse_args()
    if options.reports is None:
        PAGE.write_text(write_page(), encoding="utf-8")
        return 0
    faults = say_faults(options.reports)
    print(*faults or ["the tests of all rows of docs/support.md passed"], sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
