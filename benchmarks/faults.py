"""Fault injection: kill and stop processes of a server while they compute.

    python benchmarks/faults.py [--rounds 10] [--processes 2 4] [--go-on]

Each round starts `examples/serve_http.py` on several processes of a small model, with
restarts, and injects four faults: SIGKILL and SIGSTOP of a follower and of the first
process, each while a completion and a stream are computed. Every other process has to
exit within 30 seconds with a reason; the launcher reports the cause and restarts all of
them. The completion is requested by OpenAI's client with its default two retries, and
has to equal the one without faults; the stream must not end as if it were complete. At
the end of a round no process is left. Listening ports have to be bound to the given
address.

The seconds are in results/faults.json, one row per kind of fault, written after each
round; `--go-on` runs only the missing rounds.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import harness
import openai
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
SIZES = "--context 1024 --max-running 4 --max-new-tokens 900 --rows 8 --scan-layers"
PROMPT, TOKENS = "The with statement", 700
HEARTBEAT = 10  # seconds
MOST_TO_END = 30  # seconds, for a process after another one's fault
MOST_TO_START = 300  # seconds, on a busy machine
MOST_CHARACTERS = 160  # of a process's reported reason
FAULTS = [*itertools.product(("follower", "first"), (signal.SIGKILL, signal.SIGSTOP))]
# Four heads, to shard over four processes, and the fewest layers.
SMALLER = {192: 64, 512: 128}
HEADS, HEAD_DIM, LAYERS = 4, 16, 1
# Compilation dominates, and is not measured.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# The reason that a process reports: an error of ours, or JAX's with the next line,
# which may have a task's name.
REASONS = re.compile(
    r"^error: (.*)|Terminating process because.*absl::Status: (.*\n.*)", re.MULTILINE
)
COLUMNS = {
    "processes": "processes",
    "fault": "fault",
    "rounds": "rounds",
    "others": "s until the others end",
    "others_most": "most",
    "answer": "s until the text is there",
    "answer_most": "most",
}


def make_model(folder):
    """Write a checkpoint: slices of the bundled model's matrices."""
    bundled = EXAMPLES / "models" / "pydoc"
    shutil.copytree(bundled, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": SMALLER[config["hidden_size"]],
        "intermediate_size": SMALLER[config["intermediate_size"]],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
    }
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    corners = {
        name: array[tuple(slice(SMALLER.get(size, size)) for size in array.shape)]
        for name, array in load_file(path).items()
        if not (layer := re.search(r"layers\.(\d+)\.", name)) or int(layer[1]) < LAYERS
    }
    save_file({name: array.copy() for name, array in corners.items()}, path)


class Job:
    """The processes of a server, and their launcher."""

    def __init__(self, model, folder, num_processes):
        self.port = harness.find_port()
        self._num_processes, self._logs = num_processes, folder / "logs"
        self._log = folder / "said"
        command = [sys.executable, str(EXAMPLES / "serve_http.py"), *SIZES.split()]
        command += f"--processes {num_processes} --devices 1 --grammars 0".split()
        command += f"--heartbeat {HEARTBEAT} --restarts {len(FAULTS)}".split()
        command += ["--model", str(model), "--port", str(self.port)]
        command += ["--logs", str(self._logs)]
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                command,
                env=os.environ | {"XLA_FLAGS": FLAGS},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def log(self):
        """The launcher's output."""
        return self._log.read_text()

    @property
    def pids(self):
        """The newest process ids, in order."""
        found = re.findall(r"process \d+ has pid (\d+)", self.log)
        num_whole = len(found) // self._num_processes * self._num_processes
        return [*map(int, found[:num_whole][-self._num_processes :])]

    @property
    def all_pids(self):
        """The process ids of the launcher and all processes it started."""
        found = re.findall(r"has pid (\d+)", self.log)
        return [self._launcher.pid, *map(int, found)]

    def read_number(self, name):
        """Return a metric of the engine; None if the server does not respond."""
        address = f"http://127.0.0.1:{self.port}/metrics"
        try:
            with urllib.request.urlopen(address, timeout=5) as reply:
                found = re.search(rf"^{name} (\S+)$", reply.read().decode(), re.M)
        except OSError:
            return None
        return float(found[1])

    def wait_until_ready(self):
        """Wait until the server responds."""
        end = time.monotonic() + MOST_TO_START
        while self.read_number("jkv_blocks") is None:
            if self._launcher.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not start: {self.log}")
            time.sleep(0.1)

    def size_logs(self):
        """Return the log size of each process."""
        return [path.stat().st_size for path in self._find_logs()]

    def read_reasons(self, sizes):
        """Return the reason that each process has reported since `sizes`."""
        found = []
        for path, size in zip(self._find_logs(), sizes, strict=True):
            reason = REASONS.search(path.read_bytes()[size:].decode(errors="replace"))
            words = (reason[1] or reason[2]).split() if reason else []
            found.append(" ".join(words)[:MOST_CHARACTERS] or None)
        return found

    def find_addresses(self):
        """Return the addresses on which the processes listen (Linux)."""
        inodes = set()
        for pid in self.all_pids:
            for path in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    inodes.add(os.readlink(path))
                except OSError:
                    continue  # closed meanwhile
        found = set()
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                is_listening = fields[3] == "0A"
                if is_listening and f"socket:[{fields[9]}]" in inodes:
                    words = bytes.fromhex(fields[1].partition(":")[0])
                    # 32-bit words in the machine's byte order.
                    parts = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                    found.add(socket.inet_ntop(family, b"".join(parts)))
        return found

    def stop(self):
        """Send SIGTERM; return the exit status and the process ids still running."""
        pids = self.all_pids
        self._launcher.send_signal(signal.SIGTERM)
        try:
            status = self._launcher.wait(timeout=60)
        except subprocess.TimeoutExpired:
            status = None
            self._launcher.kill()
            self._launcher.wait()
        return status, [pid for pid in pids if is_running(pid)]

    def _find_logs(self):
        return [self._logs / f"process-{i}.log" for i in range(self._num_processes)]


def is_running(pid):
    """Return True if a process exists and is not a zombie."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] not in "ZX"


class Asking(threading.Thread):
    """A client that requests a completion or a stream."""

    def __init__(self, port, *, stream):
        super().__init__(daemon=True)
        base = f"http://127.0.0.1:{port}/v1"
        self._client = openai.OpenAI(base_url=base, api_key="none")
        self._stream = stream
        self.text = self.error = self.ended = None
        self.start()

    def run(self):
        """Send one request with the default client."""
        options = dict(model=self._client.models.list().data[0].id, prompt=PROMPT)
        options |= dict(max_tokens=TOKENS, temperature=0, timeout=MOST_TO_START)
        options["extra_body"] = {"ignore_eos": True}
        try:
            reply = self._client.completions.create(**options, stream=self._stream)
            pieces = reply if self._stream else [reply]
            self.text = "".join(piece.choices[0].text for piece in pieces)
        except Exception as error:
            self.error = error
        self.ended = time.monotonic()


def do_fault(job, expected, contender, number, rng):
    """Inject one fault during computation; return a row and the violations."""
    job.wait_until_ready()
    pids, sizes = job.pids, job.size_logs()
    chosen = 0 if contender == "first" else rng.randrange(1, len(pids))
    others = {i: pid for i, pid in enumerate(pids) if i != chosen}
    whole, stream = Asking(job.port, stream=False), Asking(job.port, stream=True)
    while job.read_number("jkv_requests_running") != 2:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    os.kill(pids[chosen], number)
    began, ends = time.monotonic(), {}
    while len(ends) < len(others) and time.monotonic() < began + MOST_TO_START:
        for i, pid in others.items():
            if i not in ends and not is_running(pid):
                ends[i] = time.monotonic() - began
        time.sleep(0.01)
    for client in (whole, stream):
        client.join(timeout=MOST_TO_START)
    reasons = job.read_reasons(sizes)
    fault = f"{number.name} of {'the first' if contender == 'first' else 'a follower'}"
    wrong = []
    if len(ends) < len(others) or max(ends.values()) > MOST_TO_END:
        wrong.append(f"others ended after {ends}")
    wrong += [f"process {i} gave no reason" for i in others if reasons[i] is None]
    if whole.text != expected:
        wrong.append(f"completion is {whole.text!r}, error {whole.error!r}")
    if stream.error is None and stream.text != expected:
        wrong.append("a stream ended as if it were whole")
    return {
        "processes": len(pids),
        "fault": fault,
        "others": max(ends.values(), default=None),
        "answer": None if whole.ended is None else whole.ended - began,
        "said": sorted({reasons[i] for i in others if reasons[i]}),
    }, [f"{len(pids)} processes, {fault}: {each}" for each in wrong]


def play(model, num_processes, rng):
    """Inject all faults into one server; return their rows and the violations."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(model, pathlib.Path(name), num_processes)
        rows, wrong = [], []
        try:
            job.wait_until_ready()
            addresses = job.find_addresses()
            before = Asking(job.port, stream=False)
            before.join()
            if before.error:
                raise before.error
            for contender, number in FAULTS:
                row, found = do_fault(job, before.text, contender, number, rng)
                rows.append(row)
                wrong += found
                harness.progress(f"{row} {found}")
            job.wait_until_ready()
        finally:
            status, left = job.stop()
        if status != 128 + signal.SIGTERM:
            wrong.append(f"the launcher ended with {status}: {job.log}")
        if left:
            wrong.append(f"processes {left} still run")
        if not addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}:
            wrong.append(f"ports are bound to {sorted(addresses)}")
    return rows, wrong


def summarize(rows):
    """Return medians and maxima for each kind of fault."""
    found = []
    for kind in dict.fromkeys((row["processes"], row["fault"]) for row in rows):
        same = [row for row in rows if (row["processes"], row["fault"]) == kind]
        row = {"processes": kind[0], "fault": kind[1], "rounds": len(same)}
        for name in ("others", "answer"):
            seconds = [each[name] for each in same if each[name] is not None]
            row[name] = statistics.median(seconds) if seconds else None
            row[f"{name}_most"] = max(seconds, default=None)
        row["said"] = sorted({message for each in same for message in each["said"]})
        found.append(row)
    return found


def read_rounds(path):
    """Return the rows and violations of the latest run."""
    newest = json.loads(path.read_text())["runs"][-1]
    return newest["each"], newest["wrong"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=10, help="of all faults; %(default)s")
    add("--processes", type=int, nargs="+", default=[2, 4], help="2 and 4")
    add("--output", type=pathlib.Path, default=RESULTS)
    add("--go-on", action="store_true", help="keep the rounds of the output")
    options = parser.parse_args()
    machine = harness.machine()
    rows, wrong = read_rounds(options.output) if options.go_on else ([], [])
    done = len(rows) // (len(FAULTS) * len(options.processes))
    rng = random.Random(done)
    with tempfile.TemporaryDirectory() as name:
        model = pathlib.Path(name, "small")
        make_model(model)
        for number in range(done, options.rounds):
            for num_processes in options.processes:
                some, found = play(model, num_processes, rng)
                rows += some
                wrong += found
            harness.progress(f"round {number + 1} of {options.rounds}: {wrong}")
            run = {"benchmark": "faults", "machine": machine, "rows": summarize(rows)}
            harness.save(options.output, run | {"wrong": wrong, "each": rows})
    print(harness.header("Faults of processes that serve", machine))
    print(harness.table(summarize(rows), COLUMNS))
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
