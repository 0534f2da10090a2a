"""Processes of a server are killed and stopped while they compute, round after round.

    python benchmarks/faults.py [--rounds 10] [--processes 2 4] [--go-on]

Each round starts `examples/serve_http.py` on so many processes of a small model, with
restarts, and does four things to it: SIGKILL and SIGSTOP of a follower and of the first
process, each while a text and a stream are computed. Every other process has to end
within 30 seconds and to say why; the launcher says which one was the cause, and starts
all of them again. The text is asked for by OpenAI's client as it comes, which tries
twice more by itself, and has to be the one that it was before; the stream must not end
as if it were whole. At the end of a round nothing runs any more. Ports that processes
listen on have to be bound to the address given.

The seconds are in results/faults.json, a row for each kind of fault. They are written
after each round, and `--go-on` plays only those rounds that are not there.
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
MOST_TO_END = 30  # seconds, for a process after the fault of another one
MOST_TO_START = 300  # seconds, for what takes some on a busy machine
MOST_CHARACTERS = 160  # of what a process says
FAULTS = [*itertools.product(("follower", "first"), (signal.SIGKILL, signal.SIGSTOP))]
# Four heads, so that four processes can share them, and as few layers as there can be.
SMALLER = {192: 64, 512: 128}
HEADS, HEAD_DIM, LAYERS = 4, 16, 1
# Time goes into compiling, and none of it is measured here.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# What a process says of its end: an error of ours, or JAX's with the line behind it,
# which may have the name of a task.
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
    """Write a checkpoint: corners of the bundled model's matrices."""
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
        self._said = folder / "said"
        command = [sys.executable, str(EXAMPLES / "serve_http.py"), *SIZES.split()]
        command += f"--processes {num_processes} --devices 1 --grammars 0".split()
        command += f"--heartbeat {HEARTBEAT} --restarts {len(FAULTS)}".split()
        command += ["--model", str(model), "--port", str(self.port)]
        command += ["--logs", str(self._logs)]
        with self._said.open("wb") as said:
            self._launcher = subprocess.Popen(
                command,
                env=os.environ | {"XLA_FLAGS": FLAGS},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    @property
    def said(self):
        """What the launcher has said."""
        return self._said.read_text()

    @property
    def pids(self):
        """The processes that were started last, in their order."""
        found = re.findall(r"process \d+ has pid (\d+)", self.said)
        num_whole = len(found) // self._num_processes * self._num_processes
        return [*map(int, found[:num_whole][-self._num_processes :])]

    @property
    def all_pids(self):
        """The launcher, and all that it ever started."""
        found = re.findall(r"has pid (\d+)", self.said)
        return [self._launcher.pid, *map(int, found)]

    def read_number(self, name):
        """Return a number of the engine; nothing where it does not answer."""
        address = f"http://127.0.0.1:{self.port}/metrics"
        try:
            with urllib.request.urlopen(address, timeout=5) as reply:
                found = re.search(rf"^{name} (\S+)$", reply.read().decode(), re.M)
        except OSError:
            return None
        return float(found[1])

    def wait_until_ready(self):
        """Return when it answers."""
        end = time.monotonic() + MOST_TO_START
        while self.read_number("jkv_blocks") is None:
            if self._launcher.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not start: {self.said}")
            time.sleep(0.1)

    def size_logs(self):
        """Return how long the log of each process is."""
        return [path.stat().st_size for path in self._find_logs()]

    def read_reasons(self, sizes):
        """Return what each process said of its end since its log was so long."""
        found = []
        for path, size in zip(self._find_logs(), sizes, strict=True):
            reason = REASONS.search(path.read_bytes()[size:].decode(errors="replace"))
            words = (reason[1] or reason[2]).split() if reason else []
            found.append(" ".join(words)[:MOST_CHARACTERS] or None)
        return found

    def find_addresses(self):
        """Return the addresses that its processes listen on, where Linux tells."""
        inodes = set()
        for pid in self.all_pids:
            for path in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    inodes.add(os.readlink(path))
                except OSError:
                    continue  # it is closed
        found = set()
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                is_listening = fields[3] == "0A"
                if is_listening and f"socket:[{fields[9]}]" in inodes:
                    words = bytes.fromhex(fields[1].partition(":")[0])
                    # Each word of 32 bits is in the machine's order.
                    parts = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                    found.add(socket.inet_ntop(family, b"".join(parts)))
        return found

    def stop(self):
        """End it by SIGTERM; return its status, and what of it still runs."""
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
    """Whether a process is there, and has not ended."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] not in "ZX"


class Asking(threading.Thread):
    """A client that asks for the text, or for a stream of it."""

    def __init__(self, port, *, stream):
        super().__init__(daemon=True)
        base = f"http://127.0.0.1:{port}/v1"
        self._client = openai.OpenAI(base_url=base, api_key="none")
        self._stream = stream
        self.text = self.error = self.ended = None
        self.start()

    def run(self):
        """Ask once, by a client as it comes."""
        asked = dict(model=self._client.models.list().data[0].id, prompt=PROMPT)
        asked |= dict(max_tokens=TOKENS, temperature=0, timeout=MOST_TO_START)
        asked["extra_body"] = {"ignore_eos": True}
        try:
            reply = self._client.completions.create(**asked, stream=self._stream)
            pieces = reply if self._stream else [reply]
            self.text = "".join(piece.choices[0].text for piece in pieces)
        except Exception as error:
            self.error = error
        self.ended = time.monotonic()


def do_fault(job, expected, who, number, rng):
    """Do one thing to a process while it computes; return a row and what is wrong."""
    job.wait_until_ready()
    pids, sizes = job.pids, job.size_logs()
    chosen = 0 if who == "first" else rng.randrange(1, len(pids))
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
    fault = f"{number.name} of {'the first' if who == 'first' else 'a follower'}"
    wrong = []
    if len(ends) < len(others) or max(ends.values()) > MOST_TO_END:
        wrong.append(f"others ended after {ends}")
    wrong += [f"process {i} said nothing" for i in others if reasons[i] is None]
    if whole.text != expected:
        wrong.append(f"the text is {whole.text!r}, error {whole.error!r}")
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
    """Do all faults to one job; return their rows, and what is wrong."""
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
            for who, number in FAULTS:
                row, found = do_fault(job, before.text, who, number, rng)
                rows.append(row)
                wrong += found
                harness.progress(f"{row} {found}")
            job.wait_until_ready()
        finally:
            status, left = job.stop()
        if status != 128 + signal.SIGTERM:
            wrong.append(f"the launcher ended with {status}: {job.said}")
        if left:
            wrong.append(f"processes {left} still run")
        if not addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}:
            wrong.append(f"ports are bound to {sorted(addresses)}")
    return rows, wrong


def summarize(rows):
    """Return a row for each kind of fault: medians, and the most."""
    found = []
    for kind in dict.fromkeys((row["processes"], row["fault"]) for row in rows):
        same = [row for row in rows if (row["processes"], row["fault"]) == kind]
        row = {"processes": kind[0], "fault": kind[1], "rounds": len(same)}
        for name in ("others", "answer"):
            seconds = [each[name] for each in same if each[name] is not None]
            row[name] = statistics.median(seconds) if seconds else None
            row[f"{name}_most"] = max(seconds, default=None)
        row["said"] = sorted({said for each in same for said in each["said"]})
        found.append(row)
    return found


def read_rounds(path):
    """Return the rows of the rounds that were played last, and what was wrong."""
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
