"""lm-eval's `local-completions` runs tasks against the server, without downloads.

One task of each type: multiple choice, likelihood of whole texts, and generation. The
results are recomputed with `jkv.score`.
"""

import json
import math
import os
import subprocess
import sys

import pytest
from served.api import make_app
from support.serving.http_server import load_served, start_server

ROWS = [
    {"question": "The with statement is", "choices": [" used to", " banana"]},
    {"question": "Return a new", "choices": [" the the the", " set"]},
    {"question": "The import", "choices": [" system", " xyzzy"]},
    {"question": "Every class", "choices": [" of of", " has"]},
]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: byte_perplexity}]
""",
    "generated": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zzz"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return load_served(tmp_path_factory.mktemp("models") / "pydoc")


@pytest.fixture(scope="module")
def results(served, tmp_path_factory):
    """lm-eval's results of the tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    where = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    for name, task in TASKS.items():
        config = f"task: {name}\n{where}test_split: test{task}"
        (folder / f"{name}.yaml").write_text(config)
    server, thread, address = start_server(make_app(served))
    model = (
        f"model=pydoc,base_url={address}/v1/completions,tokenizer={served.folder},"
        "tokenized_requests=True,max_length=95,num_concurrent=2"
    )
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder)]
    command += ["--model_args", model, "--batch_size", "4", "--log_samples"]
    command += ["--output_path", str(folder / "out")]
    try:
        environment = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hub")}
        subprocess.run(command, env=environment, check=True, timeout=400)
    finally:
        server.should_exit = True
        thread.join()
    (found,) = (folder / "out").rglob("results_*.json")
    return json.loads(found.read_text())["results"]


def measure(served, text, before):
    """Return the log-probability of a text after a possibly empty other one."""
    behind = served.tokenizer.encode(before + text).ids
    known = served.tokenizer.encode(before).ids if before else [*served.stop_tokens]
    ids = behind if before else known + behind
    (scored,) = served.scorer.score([ids])
    return sum(scored.logprobs[len(known) :])


def test_the_likelier_choice_wins(results, served):
    right = 0
    for row in ROWS:
        first, second = (measure(served, c, row["question"]) for c in row["choices"])
        right += first > second
    assert 0 < right < len(ROWS)
    assert results["choice"]["acc,none"] == pytest.approx(right / len(ROWS))


def test_whole_texts_have_their_likelihood(results, served):
    texts = [row["question"] + row["choices"][0] for row in ROWS]
    total = sum(measure(served, text, "") for text in texts)
    expected = math.exp(-total / sum(len(text.encode()) for text in texts))
    found = results["rolling"]["byte_perplexity,none"]
    assert found == pytest.approx(expected, rel=1e-3)


def test_texts_are_generated(results):
    assert results["generated"]["exact_match,none"] == 0.0
