"""Soak test of the HTTP server with mixed clients for an hour: no losses, no leaks.

    python benchmarks/soak_http.py [--minutes 60] [--clients 200]
    python benchmarks/soak_http.py --processes 2
    python benchmarks/soak_http.py --ray [--replicas 3]

A server runs as users start it (`examples/serve_http.py`, with `--processes` sharded
over several; with `--ray` replicas by `examples/serve_ray.py`). Each client sends one
request after another: completions, streams, streams closed after some tokens, abandoned
requests, deadlines, invalid bodies. Half of them have a higher priority. Every
completion is greedy and known, so each response is checked. Meanwhile

* the weights are reloaded twice from their folder;
* with `--processes` a follower is killed in between, and the launcher restarts all
  processes: clients repeat open requests, which must then succeed;
* with `--ray` two replicas are killed one after the other, with a weight update of all
  in between; only a stream may then end, with an explicit error.

Clients do not retry by themselves, so that failures hidden by OpenAI's client are seen.
On a machine so busy that clients stall for seconds, connections are lost: the server
closes one without a request head after ten seconds.

Without `--ray` the engine checks the cache's invariants after every window. The run
fails for wrong, missing or duplicate responses, for blocks or requests left at the end,
or if a process has grown. Figures are in results/soak_http.json.
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

from support.serving.replicas import find_replicas  # noqa: E402 (the path is set above)

EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "benchmarks" / "results" / "soak_http.json"
SIZES = "--context 256 --max-running 16 --max-new-tokens 48 --max-waiting 96"
SIZES += " --rows 32 --scan-layers"  # reduces compilation at each start
MOST_GROWTH = 64 * 2**20  # bytes per process, from a tenth of the run to its end
MOST_SECONDS = 900  # for a weight update, and for a restart
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
    """A server in one or several processes.

    Attributes:
      grown: growth of the largest process in bytes, for each of its runs.
    """

    def __init__(self, options, folder):
        self.is_ray, self.port = options.ray, options.port
        self.num_processes = options.processes
        self._log = folder / "said"
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
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=log
            )
        self.grown = []

    def wait_until_ready(self):
        """Wait until the server responds."""
        while True:
            try:
                return self.read("/health")
            except OSError:
                if self._process.poll() is not None:
                    sys.exit(f"the server did not start: {self._log.read_text()}")
                time.sleep(1)

    def read(self, path):
        """Return the response of a path."""
        address = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(address, timeout=30) as reply:
            return reply.read().decode()

    def read_number(self, name):
        """Return the sum of a metric over all engines."""
        found = re.findall(
            rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.read("/metrics"), re.M
        )
        return sum(map(float, found))

    def find_processes(self):
        """Return the process ids of the engines; for one engine, in order."""
        if self.is_ray:
            return find_replicas()
        if self.num_processes == 1:
            return [self._process.pid]
        found = re.findall(r"process (\d+) has pid (\d+)", self._log.read_text())
        newest = dict(found)  # the last one of each number
        return [int(newest[str(number)]) for number in range(self.num_processes)]

    def measure(self):
        """Return the largest engine's memory in bytes."""
        pages = [
            int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
            for process in self.find_processes()
        ]
        return max(pages) * os.sysconf("SC_PAGE_SIZE")

    def begin_to_grow(self):
        """Record the reference memory."""
        self._early = self.measure()

    def note_growth(self):
        """Record the growth since the reference."""
        self.grown.append(self.measure() - self._early)

    def kill_replica(self):
        """Kill one replica."""
        os.kill(self.find_processes()[0], signal.SIGKILL)

    def kill_follower(self):
        """Kill a follower; return the seconds until all processes are back."""
        self.note_growth()
        before, began = self.find_processes(), time.monotonic()
        os.kill(before[-1], signal.SIGKILL)
        while {*before} & {*self.find_processes()}:
            self._wait(began, "start again")
        self.wait_until_ready()
        return time.monotonic() - began

    def change_weights(self):
        """Reload the weights; for replicas from another folder."""
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
        """Terminate the server and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)

    def _wait(self, began, what):
        if time.monotonic() - began > MOST_SECONDS:
            raise TimeoutError(f"server did not {what} within {MOST_SECONDS} s")
        time.sleep(1)


class Crowd:
    """Clients and their observations."""

    def __init__(self, options):
        base = f"http://127.0.0.1:{options.port}/v1"
        self._client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
        self._num_clients, self._is_ray = options.clients, options.ray
        self._expected = {}
        self.is_cut = False  # True after processes were killed, during the restart
        self.longest_pause = 0.0  # seconds in which the clients themselves stalled
        self.seen = collections.Counter()
        self.ids = collections.Counter()
        self.waits = {-1: [], 0: []}  # seconds to first token, by priority
        self.mistakes = []

    async def learn(self):
        """Request each completion once without load, as the reference."""
        for prompt in PROMPTS:
            for length in (8, 48):
                reply = await self._ask(prompt, length, 0)
                self._expected[prompt, length] = reply.choices[0].text

    async def run(self, until, bar):
        """Run all clients until a deadline."""
        await asyncio.gather(
            *(self._talk(number, until, bar) for number in range(self._num_clients))
        )

    async def watch_itself(self):
        """Record the clients' own stalls, which are due to a busy machine."""
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

    async def _try(self, kind, ask, *given):
        """Send a request; return False if it has to be repeated."""
        was_cut = self.is_cut
        try:
            await ask(*given)
            self.seen[kind] += 1
        except openai.RateLimitError as error:
            self.seen["told to come later"] += 1
            await asyncio.sleep(float(error.response.headers["Retry-After"]))
        except Exception as error:
            if was_cut or self.is_cut:
                return False
            # A stream on a replica that was killed.
            is_rest = isinstance(error, openai.APIError) and "died" in str(error)
            is_begun = not isinstance(error, openai.APIStatusError)
            if self._is_ray and is_rest and is_begun:
                self.seen["cut by a death"] += 1
                return True
            self._note(f"{kind}: {describe(error)}")
        return True

    @property
    def num_asked(self):
        """Number of requests; a repeated one counts once."""
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
    """Return an error and its chain of causes."""
    chain = []
    while error is not None:
        chain.append(repr(error))
        error = error.__cause__ or error.__context__
    return " from ".join(chain)


async def disturb(server, crowd, minutes):
    """Update weights and kill processes; return the seconds of each restart."""
    seconds = []

    async def kill_follower():
        crowd.is_cut = True
        seconds.append(await asyncio.to_thread(server.kill_follower))
        await asyncio.sleep(10)  # until responses in flight have arrived
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
    """Run all clients; return them, the restarts and the seconds."""
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
    """Return the violations at the end."""
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
    # Replacements of killed replicas are smaller.
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
    """Run the soak test, print the results, and exit with 1 if it failed."""
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
