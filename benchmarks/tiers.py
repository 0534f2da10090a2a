"""KV cache offloading: savings by restored blocks, and the overhead of spilling.

    python benchmarks/tiers.py [--model FOLDER] [--rounds N]

* the first token of a prompt of 4,096 tokens: computed, and with its blocks restored
  from a store's memory, and from its folder (possibly in the system's page cache), by
  the same engine;
* a window of steps of 8 sequences in an engine that keeps spilling cached blocks to a
  store, and in one without a store.

Rounds are interleaved; the default model is SmolLM2 135M.
"""

import argparse
import pathlib
import sys
import tempfile

import harness
import jax.numpy as jnp
import numpy as np
from harness import Case

import jkv
from jkv.serving import Engine

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "tiers.json"
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]

import models  # noqa: E402  (found through the line above)
import pretrained  # noqa: E402

PROMPT, NEW, SEQUENCES, SHORT = 4096, 64, 8, 100


class Bench:
    """Engines of one model, and random prompts."""

    def __init__(self, model: str | pathlib.Path) -> None:
        self.model, self.params = pretrained.load(model, jnp.float32, loop_layers=True)
        self.rng = np.random.default_rng(0)

    def prompt(self, length: int) -> list[int]:
        """Return new random tokens."""
        return self.rng.integers(9, 10_000, length).tolist()

    def engine(
        self, context: int, num_blocks: int, running: int, store: jkv.BlockStore | None
    ) -> Engine:
        """Return a compiled engine."""
        config = self.model.cache_config(
            context,
            max_sequences=running,
            dtype=jnp.float32,
            prefix_caching=True,
            num_blocks=num_blocks,
        )
        engine = Engine(
            self.model,
            self.params,
            jkv.init(config),
            max_running=running,
            max_new_tokens=NEW,
            row_counts=(running, 256),
            store=store,
        )
        engine.warm_up()
        return engine

    def first_tokens(self, folder: str) -> list[Case]:
        """Return cases of the first token: computed, restored from memory or disk."""
        blocks = -(-(PROMPT + NEW) // 16) + 8
        near = self.engine(PROMPT + NEW, blocks, 1, jkv.BlockStore(2**30))
        far_store = jkv.BlockStore(0, folder=folder, max_folder_bytes=2**33)
        far = self.engine(PROMPT + NEW, blocks, 1, far_store)
        without = self.engine(PROMPT + NEW, blocks, 1, None)
        known = self.prompt(PROMPT)

        def ready(engine: Engine) -> tuple[Engine, list[int]]:
            # Spill the cached blocks, as other sequences would.
            engine.generate([known], max_new_tokens=1)
            engine.close()
            if engine is far:
                far_store.flush()
            return engine, known

        def ask(given: tuple[Engine, list[int]]) -> None:
            engine, prompt = given
            next(engine.stream(engine.submit(prompt, max_new_tokens=1)))

        def case(name: str, engine: Engine, fresh: bool) -> Case:
            def prepare() -> tuple[Engine, list[int]]:
                return (engine, self.prompt(PROMPT)) if fresh else ready(engine)

            return Case(name=name, prepare=prepare, run=ask, labels={"what": name})

        self.near, self.far = near, far
        return [
            case("computed", without, True),
            case("from memory", near, False),
            case("from the folder", far, False),
        ]

    def windows(self) -> list[Case]:
        """Return steps of growing sequences, with a spilling store and without one."""
        blocks = SEQUENCES * -(-(SHORT + NEW) // 16) * 2
        stores = {
            "without a store": None,
            "beside blocks that leave": jkv.BlockStore(2**31),
        }
        cases = []
        for name, store in stores.items():
            engine = self.engine(SHORT + NEW, blocks, SEQUENCES, store)

            def prepare(engine: Engine = engine) -> Engine:
                # Fill the pool with cached blocks, then start eight sequences.
                for _ in range(2):
                    prompts = [self.prompt(SHORT) for _ in range(SEQUENCES)]
                    engine.generate(prompts, max_new_tokens=NEW)
                for _ in range(SEQUENCES):
                    engine.submit(self.prompt(SHORT), max_new_tokens=NEW)
                while engine.stats().running < SEQUENCES:
                    engine.step()
                for _ in range(2):
                    engine.step()
                return engine

            def run(engine: Engine) -> None:
                for _ in range(4):
                    engine.step()

            cases.append(
                Case(
                    name=name, prepare=prepare, run=run, calls=32, labels={"what": name}
                )
            )
            self.growing = engine
        return cases


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("KV cache offloading", where))
    bench = Bench(options.model or models.fetch("smollm2"))
    rows, judged = [], []
    with tempfile.TemporaryDirectory() as folder:
        cases = bench.first_tokens(folder)
        samples = harness.interleave(cases, rounds=options.rounds, warmup=1)
        for case in cases:
            ratio = samples[case.name].ratio_to(samples["computed"])
            rows.append({**case.labels, **samples[case.name].row(1e3), "ratio": ratio})
        for name in ("from memory", "from the folder"):
            ratio = samples[name].ratio_to(samples["computed"])
            judged.append(harness.judge(f"first token {name} / computed", ratio, 0.3))
        found = {
            name: engine.stats().restored_tokens
            for name, engine in (("memory", bench.near), ("folder", bench.far))
        }
    cases = bench.windows()
    samples = harness.interleave(cases, rounds=options.rounds, warmup=1)
    for case in cases:
        ratio = samples[case.name].ratio_to(samples["without a store"])
        rows.append({**case.labels, **samples[case.name].row(1e3), "ratio": ratio})
    judged.append(harness.judge("a step beside spilling / without", ratio, 1.05))
    spilled = bench.growing.stats().spilled_blocks
    columns = {"what": "", "median": "median ms", "p10": "p10", "p90": "p90"}
    print(harness.table(rows, columns | {"ratio": "ratio", "samples": "samples"}))
    print(harness.table(judged, {key: key for key in judged[0]}))
    print(f"tokens restored: {found}; blocks spilled: {spilled}")
    where["load after"] = harness.machine()["load"]
    run = {
        "benchmark": "tiers",
        "machine": where,
        "rows": rows,
        "judged": judged,
        "restored tokens": found,
        "spilled blocks": spilled,
    }
    harness.save(options.json, run)
    print(f"saved in {options.json}")


if __name__ == "__main__":
    main()
