"""Whether attention on this device is what the reference says, feature by feature."""

import functools
import itertools

import jax
import jax.numpy as jnp

from jkv.attention import paged_attention
from jkv.commands.cases import CASES, Case, make_operands
from jkv.commands.report import Report

IMPLEMENTATIONS = ("xla", "pallas")

# Largest error against the reference, by dtype: a few units of the last place of
# values around 1.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def check_attention(report: Report) -> None:
    """Compare the implementations with the reference, feature by feature."""
    for implementation, dtype in itertools.product(IMPLEMENTATIONS, TOLERANCES):
        check_implementation(report, implementation, dtype)
    if on_cpu():
        report.add("not checked", "the compiled kernel", "there is no GPU here")


def check_implementation(report: Report, implementation: str, dtype: str) -> None:
    """Compare one implementation in one dtype: a finding for all cases that agree."""
    tolerance = TOLERANCES[dtype]
    refused: dict[str, list[str]] = {}
    errors = []
    for case in CASES:
        try:
            error = find_error(case, dtype, implementation)
        except NotImplementedError as reason:
            refused.setdefault(str(reason), []).append(case.name)
            continue
        errors.append(error)
        if not error <= tolerance:  # NaN too
            what = f"{implementation}, {dtype}, {case.name}"
            report.add("FAILED", what, f"error {error:.2g}")
    for why, names in refused.items():
        what = f"{implementation}, {dtype}: {', '.join(names)}"
        report.add("not checked", what, why)
    if errors:
        is_interpreted = implementation == "pallas" and on_cpu()
        how = " (interpreted)" if is_interpreted else ""
        what = f"{implementation}, {dtype}{how}: {len(errors)} cases"
        agree = all(error <= tolerance for error in errors)
        report.add("ok" if agree else "FAILED", what, f"{max(errors):.1e}")


def find_error(case: Case, dtype: str, implementation: str) -> float:
    """Return the largest difference from the reference; NaN slots are never read."""
    operands, options = make_operands(case, dtype)
    call = functools.partial(paged_attention, *operands, **options)
    found = jax.jit(functools.partial(call, implementation=implementation))()
    wanted = jax.jit(functools.partial(call, implementation="reference"))()
    difference = found.astype(jnp.float32) - wanted.astype(jnp.float32)
    return float(jnp.max(jnp.abs(difference)))


def on_cpu() -> bool:
    """Return whether JAX runs on the processor itself."""
    return jax.devices()[0].platform == "cpu"
