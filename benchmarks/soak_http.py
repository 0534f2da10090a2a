"""Clients of all kinds on a server for an hour: nothing is lost, nothing is left.

    python benchmarks/soak_http.py [--minutes 60] [--clients 200]
    python benchmarks/soak_http.py --processes 2
    python benchmarks/soak_http.py --ray [--replicas 3]

A server runs as users start it (`examples/serve_http.py`, with `--processes` shared
among several; with `--ray` replicas on `examples/serve_ray.py`), and as many clients as
are asked for talk to it, each one request after the other: whole answers, streams,
streams that are left after some tokens, answers that are not waited for, deadlines,
bodies that are wrong. Half of them have a higher priority. Every text is greedy and
known, so each answer is checked. Meanwhile

* the weights are read anew twice, from the folder that they were read from;
* with `--processes` a follower is killed between, and the launcher starts all processes
  again: what was open is asked again by its client, and must be answered then;
* with `--ray` two replicas are killed, one after the other, and between them the
  weights are read anew in all; a stream may then end with an error that says so, and no
  other answer may.

Clients have no retries of their own, so that what OpenAI's client would hide is seen. A
machine that is so busy that they stand still for seconds loses connections: the server
closes one whose head does not come within ten.

Without `--ray` the engine looks at the cache's invariants after every window, and fails
if one is broken. The run fails if an answer is wrong, missing or comes twice, if at the
end blocks are not free or requests not ended, or if a process has grown. Figures go to
results/soak_http.json.
"""

import argparse
import asyncio
import collections
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import harness
import openai

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.replicas import find_replicas  # noqa: E402 (the path is set above)

EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "benchmarks" / "results" / "soak_http.json"
SIZES = "--context 256 --max-running 16 --max-new-tokens 48 --max-waiting 96"
SIZES += " --rows 32 --scan-layers"  # less to compile at each start
MOST_GROWTH = 64 * 2**20  # bytes of a process, after a tenth of the time and at the end
MOST_SECONDS = 900  # for the weights to change, and to start again
PROMPTS = [
    f"{name} objects have methods that return {kind}."
    for name in ("List", "Dict", "File", "Path")
    for kind in ("None", "a copy", "an iterator", "self", "bytes", "text")
]
KINDS = {
    "whole": 8,
    "stream": 8,
    "left stream": 3,
    "not waited for": 3,
    "with a deadline": 3,
    "wrong": 1,
}


class Server:
    """A server in a process of its own, or in several.

    Attributes:
      grown: bytes by which the largest process has grown, of each time that it ran.
    """

    def __init__(self, options, folder):
        self.is_ray, self.port = options.ray, options.port
        self.num_processes = options.processes
        self._said = folder / "said"
        script = "serve_ray.py" if options.ray else "serve_http.py"
        arguments = [*SIZES.split(), "--port", str(options.port)]
        if options.ray:
            arguments += ["--replicas", str(options.replicas), "--cpus", "0.1"]
        else:
            arguments.append("--checks")
        if options.processes > 1:
            sharing = f"--processes {options.processes} --devices 1 --restarts 3"
            arguments += [*sharing.split(), "--logs", str(folder / "logs")]
        self._command = [sys.executable, str(EXAMPLES / script), *arguments]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=said
            )
        self.grown = []

    def wait_until_ready(self):
        """Return when it answers."""
        while True:
            try:
                return self.read("/health")
            except OSError:
                if self._process.poll() is not None:
                    sys.exit(f"the server did not start: {self._said.read_text()}")
                time.sleep(1)

    def read(self, path):
        """Return what an address tells."""
        address = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(address, timeout=30) as reply:
            return reply.read().decode()

    def read_number(self, name):
        """Return the sum of a number over all engines."""
        found = re.findall(
            rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.read("/metrics"), re.M
        )
        return sum(map(float, found))

    def find_processes(self):
        """Return the process ids of the engines; of one engine, in their order."""
        if self.is_ray:
            return find_replicas()
        if self.num_processes == 1:
            return [self._process.pid]
        found = re.findall(r"process (\d+) has pid (\d+)", self._said.read_text())
        newest = dict(found)  # each number's last one
        return [int(newest[str(number)]) for number in range(self.num_processes)]

    def measure(self):
        """Return the largest engine's memory in bytes."""
        pages = [
            int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
            for process in self.find_processes()
        ]
        return max(pages) * os.sysconf("SC_PAGE_SIZE")

    def begin_to_grow(self):
        """Note the memory that later one is compared with."""
        self._early = self.measure()

    def note_growth(self):
        """Note how much larger a process is."""
        self.grown.append(self.measure() - self._early)

    def kill_replica(self):
        """Kill one replica."""
        os.kill(self.find_processes()[0], signal.SIGKILL)

    def kill_follower(self):
        """Kill a process of several; return when all are there again."""
        self.note_growth()
        before, began = self.find_processes(), time.monotonic()
        os.kill(before[-1], signal.SIGKILL)
        while {*before} & {*self.find_processes()}:
            self._wait(began, "start again")
        self.wait_until_ready()
        return time.monotonic() - began

    def change_weights(self):
        """Let the weights be read anew; those of replicas from another folder."""
        before, began = self.read_number("jkv_weights_version"), time.monotonic()
        if not self.is_ray:
            os.kill(self.find_processes()[0], signal.SIGUSR1)
            while self.read_number("jkv_weights_version") == before:
                self._wait(began, "change its weights")
            return
        with tempfile.TemporaryDirectory() as folder:
            other = pathlib.Path(folder) / "pydoc"
            shutil.copytree(EXAMPLES / "models" / "pydoc", other)
            subprocess.run(
                [*self._command, "--address", "auto", "--weights", str(other)],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            while self.read_number("jkv_weights_version") < len(self.find_processes()):
                self._wait(began, "change its weights")

    def stop(self):
        """End it, and return how."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)

    def _wait(self, began, what):
        if time.monotonic() - began > MOST_SECONDS:
            raise TimeoutError(f"the server did not {what} in {MOST_SECONDS} s")
        time.sleep(1)


class Crowd:
    """Clients, and what they saw."""

    def __init__(self, options):
        base = f"http://127.0.0.1:{options.port}/v1"
        self._client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
        self._num_clients, self._is_ray = options.clients, options.ray
        self._expected = {}
        self.is_cut = False  # whether processes have been killed, and start again
        self.longest_pause = 0.0  # s in which the clients themselves did not run
        self.seen = collections.Counter()
        self.ids = collections.Counter()
        self.waits = {-1: [], 0: []}  # seconds to the first token, by priority
        self.mistakes = []

    async def learn(self):
        """Ask for each text alone, once: what every later answer must be."""
        for prompt in PROMPTS:
            for length in (8, 48):
                reply = await self._ask(prompt, length, 0)
                self._expected[prompt, length] = reply.choices[0].text

    async def run(self, until, bar):
        """Let all clients talk until a time."""
        await asyncio.gather(
            *(self._talk(number, until, bar) for number in range(self._num_clients))
        )

    async def watch_itself(self):
        """Note how late the clients are: a busy machine, not the server, is why."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.1)
            late = time.monotonic() - began - 0.1
            self.longest_pause = max(self.longest_pause, late)

    async def _talk(self, number, until, bar):
        rng = random.Random(number)
        priority = -(number % 2)
        while time.monotonic() < until:
            (kind,) = rng.choices([*KINDS], weights=KINDS.values())
            prompt, length = rng.choice(PROMPTS), rng.choice((8, 48))
            ask = getattr(self, "_" + kind.replace(" ", "_"))
            while not await self._try(kind, ask, prompt, length, priority, rng):
                self.seen["asked again"] += 1
                await asyncio.sleep(1)
            bar(self.num_asked)

    async def _try(self, kind, ask, *asked):
        """Ask; return whether this need not be asked again."""
        was_cut = self.is_cut
        try:
            await ask(*asked)
            self.seen[kind] += 1
        except openai.RateLimitError as error:
            self.seen["told to come later"] += 1
            await asyncio.sleep(float(error.response.headers["Retry-After"]))
        except Exception as error:
            if was_cut or self.is_cut:
                return False
            # The rest of a stream whose replica was killed.
            is_rest = isinstance(error, openai.APIError) and "died" in str(error)
            is_begun = not isinstance(error, openai.APIStatusError)
            if self._is_ray and is_rest and is_begun:
                self.seen["cut by a death"] += 1
                return True
            self._note(f"{kind}: {describe(error)}")
        return True

    @property
    def num_asked(self):
        """Requests so far; one that was asked again counts once."""
        kinds = *KINDS, "told to come later", "cut by a death"
        return sum(self.seen[each] for each in kinds)

    def _ask(self, prompt, length, priority, extra=None, **options):
        return self._client.completions.create(
            model="pydoc",
            prompt=prompt,
            max_tokens=length,
            temperature=0,
            timeout=600,
            extra_body={"priority": priority} | (extra or {}),
            **options,
        )

    def _check(self, prompt, length, text, number):
        self.ids[number] += 1
        if text != self._expected[prompt, length]:
            wanted = self._expected[prompt, length]
            self._note(f"{prompt!r} was continued by {text!r}, not {wanted!r}")

    async def _whole(self, prompt, length, priority, rng):
        del rng
        reply = await self._ask(prompt, length, priority)
        self._check(prompt, length, reply.choices[0].text, reply.id)

    async def _stream(self, prompt, length, priority, rng):
        del rng
        began, text, number = time.monotonic(), "", None
        async for piece in await self._ask(prompt, length, priority, stream=True):
            if number is None:
                self.waits[priority].append(time.monotonic() - began)
            number = piece.id
            text += piece.choices[0].text
        self._check(prompt, length, text, number)

    async def _left_stream(self, prompt, length, priority, rng):
        left_after = rng.randrange(1, 4)
        async with await self._ask(prompt, 48, priority, stream=True) as pieces:
            async for piece in pieces:
                left_after -= 1
                self.ids[piece.id] = 1
                if not left_after:
                    break
        del length

    async def _not_waited_for(self, prompt, length, priority, rng):
        seconds = rng.uniform(0.01, 0.5)
        try:
            await asyncio.wait_for(self._whole(prompt, length, priority, rng), seconds)
        except TimeoutError:
            pass

    async def _with_a_deadline(self, prompt, length, priority, rng):
        timeout = {"timeout": rng.uniform(0.01, 10)}
        try:
            reply = await self._ask(prompt, length, priority, timeout)
        except openai.InternalServerError as error:
            if error.code != "deadline":
                raise
            self.seen["past the deadline"] += 1
        else:
            self._check(prompt, length, reply.choices[0].text, reply.id)

    async def _wrong(self, prompt, length, priority, rng):
        wrong = rng.choice(({"top_p": 7}, {"unheard": 1}, {"stop": ["x"] * 9}))
        try:
            await self._ask(prompt, length, priority, wrong)
        except openai.BadRequestError:
            return
        self._note(f"{wrong} was served")

    def _note(self, mistake):
        self.mistakes.append(mistake)
        harness.progress(f"{time.strftime('%H:%M:%S')} {mistake}")


def describe(error):
    """Return an error and what it came from, down to the first cause."""
    chain = []
    while error is not None:
        chain.append(repr(error))
        error = error.__cause__ or error.__context__
    return " from ".join(chain)


async def disturb(server, crowd, minutes):
    """Change the weights, and kill; return the seconds of what was started again."""
    seconds = []

    async def kill_follower():
        crowd.is_cut = True
        seconds.append(await asyncio.to_thread(server.kill_follower))
        await asyncio.sleep(10)  # what was on its way has come
        crowd.is_cut = False
        await asyncio.sleep(6 * minutes)
        server.begin_to_grow()

    async def kill_replica():
        await asyncio.to_thread(server.kill_replica)

    async def change_weights():
        await asyncio.to_thread(server.change_weights)

    if server.is_ray:
        steps = kill_replica, change_weights, kill_replica
    elif server.num_processes > 1:
        steps = change_weights, kill_follower, change_weights
    else:
        steps = change_weights, change_weights
    began = time.monotonic()
    for number, do in enumerate(steps, 1):
        due = began + 60 * minutes * number / (len(steps) + 1)
        await asyncio.sleep(max(0, due - time.monotonic()))
        await do()
        harness.progress(f"done: {do.__name__.replace('_', ' ')}")
    return seconds


async def soak(server, options):
    """Run the crowd, and return what came of it."""
    crowd = Crowd(options)
    watching = asyncio.ensure_future(crowd.watch_itself())
    await crowd.learn()
    began = time.monotonic()
    last = began

    def bar(count):
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            done = (last - began) / (60 * options.minutes)
            wrong = f", {len(crowd.mistakes)} mistakes" if crowd.mistakes else ""
            harness.progress(f"{done:.0%}, {count:,} requests{wrong}")

    await crowd.run(began + 6 * options.minutes, bar)
    server.begin_to_grow()
    _, restarts = await asyncio.gather(
        crowd.run(began + 60 * options.minutes, bar),
        disturb(server, crowd, 0.9 * options.minutes),
    )
    watching.cancel()
    return crowd, restarts, time.monotonic() - began


def judge(server, crowd):
    """Return what is wrong at the end."""
    wrong = crowd.mistakes[:10]
    wrong += [f"{n} came {k} times" for n, k in crowd.ids.items() if k > 1][:10]
    end = time.monotonic() + 60
    while server.read_number("jkv_requests_running") and time.monotonic() < end:
        time.sleep(1)
    for name in ("requests_running", "requests_waiting"):
        if server.read_number(f"jkv_{name}"):
            wrong.append(f"{name} is not 0")
    if server.read_number("jkv_blocks") != server.read_number("jkv_blocks_free"):
        wrong.append("blocks are not free")
    if '"ok"' not in server.read("/health"):
        wrong.append("it is not well")
    # Replicas that were killed have others in their place, which are smaller.
    server.note_growth()
    for grown in server.grown:
        if grown > MOST_GROWTH:
            wrong.append(f"a process has grown by {grown / 2**20:.0f} MiB")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=60.0)
    add("--clients", type=int, default=200)
    add("--processes", type=int, default=1, help="one of which is killed if several")
    add("--ray", action="store_true", help="replicas on Ray, two of which are killed")
    add("--replicas", type=int, default=3)
    add("--port", type=int, default=8300)
    add("--output", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if options.ray and options.processes > 1:
        parser.error("--processes goes without --ray: a replica is one process")
    with tempfile.TemporaryDirectory() as folder:
        run(options, pathlib.Path(folder))


def run(options, folder):
    """Soak a server, tell what came of it, and exit with whether that is wrong."""
    server = Server(options, folder)
    try:
        server.wait_until_ready()
        machine = harness.machine()
        crowd, restarts, seconds = asyncio.run(soak(server, options))
        wrong = judge(server, crowd)
        versions = server.read_number("jkv_weights_version")
        windows = server.read_number("jkv_windows_total")
    finally:
        status = server.stop()
    kinds = {1: "http"}.get(options.processes, f"{options.processes} processes")
    row = {
        "server": "ray" if options.ray else kinds,
        "minutes": round(seconds / 60, 1),
        "clients": options.clients,
        "requests": crowd.num_asked,
        **crowd.seen,
        "answers": sum(crowd.ids.values()),
        "version of the weights at the end": versions,
        "windows since the last start": windows,
        "s until all processes were there again": restarts,
        "MiB grown": [grown / 2**20 for grown in server.grown],
        "longest pause of the clients themselves, s": crowd.longest_pause,
        "mistakes": len(crowd.mistakes),
        "exit status": status,
        "wrong": wrong,
    }
    for name, priority in (("high priority", -1), ("low priority", 0)):
        if waits := sorted(crowd.waits[priority]):
            row[f"s to the first token, {name}"] = waits[len(waits) // 2]
    for name, value in row.items():
        print(f"{name}: {value}")
    name = f"soak_http, {row['server']}"
    harness.save(options.output, {"benchmark": name, "machine": machine, "rows": [row]})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
