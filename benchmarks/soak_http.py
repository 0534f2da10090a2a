"""Clients of all kinds on a server for an hour: nothing is lost, nothing is left.

    python benchmarks/soak_http.py [--minutes 60] [--clients 200]
    python benchmarks/soak_http.py --ray [--replicas 3]

A server runs as users start it (`examples/serve_http.py`; with `--ray` replicas on
`examples/serve_ray.py`), and as many clients as are asked for talk to it, each one
request after the other: whole answers, streams, streams that are left after some
tokens, answers that are not waited for, bodies that are wrong. Half of them have a
higher priority. Every text is greedy and known, so each answer is checked. With `--ray`
two replicas are killed, one after the other, and between them the weights are read anew
in all; a stream may then end with an error that says so, and no other answer may.

Fails if an answer is wrong, missing or comes twice, if at the end blocks are not free
or requests not ended, or if the process has grown. Figures go to
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
EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "benchmarks" / "results" / "soak_http.json"
SIZES = "--context 256 --max-running 16 --max-new-tokens 48 --max-waiting 96"
MOST_GROWTH = 64 * 2**20  # bytes between the first tenth and the end
PROMPTS = [
    f"{name} objects have methods that return {kind}."
    for name in ("List", "Dict", "File", "Path")
    for kind in ("None", "a copy", "an iterator", "self", "bytes", "text")
]
KINDS = ("whole", "stream", "left stream", "not waited for", "wrong")


class Server:
    """A server in a process of its own."""

    def __init__(self, options):
        self.is_ray, self.port = options.ray, options.port
        script = "serve_ray.py" if options.ray else "serve_http.py"
        arguments = [*SIZES.split(), "--port", str(options.port)]
        if options.ray:
            arguments += ["--replicas", str(options.replicas), "--cpus", "0.1"]
        self._command = [sys.executable, str(EXAMPLES / script), *arguments]
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def wait_until_ready(self):
        """Return when it answers."""
        while True:
            try:
                return self.read("/health")
            except OSError:
                if self._process.poll() is not None:
                    sys.exit("the server did not start")
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
        """Return the process ids of the engines."""
        if not self.is_ray:
            return [self._process.pid]
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(b"ray::ServeReplica:jkv:Replica"):
                    found.append(int(path.parent.name))
            except OSError:
                continue  # it has ended
        return found

    def measure(self):
        """Return the largest engine's memory in bytes."""
        pages = [
            int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
            for process in self.find_processes()
        ]
        return max(pages) * os.sysconf("SC_PAGE_SIZE")

    def kill_replica(self):
        """Kill one replica."""
        os.kill(self.find_processes()[0], signal.SIGKILL)

    def change_weights(self):
        """Give all replicas weights from another folder, which are the same."""
        with tempfile.TemporaryDirectory() as folder:
            other = pathlib.Path(folder) / "pydoc"
            shutil.copytree(EXAMPLES / "models" / "pydoc", other)
            subprocess.run(
                [*self._command, "--address", "auto", "--weights", str(other)],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            while self.read_number("jkv_weights_version") < len(self.find_processes()):
                time.sleep(1)

    def stop(self):
        """End it, and return how."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)


class Crowd:
    """Clients, and what they saw."""

    def __init__(self, options):
        base = f"http://127.0.0.1:{options.port}/v1"
        self._client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
        self._num_clients, self._is_ray = options.clients, options.ray
        self._expected = {}
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

    async def _talk(self, number, until, bar):
        rng = random.Random(number)
        priority = -(number % 2)
        while time.monotonic() < until:
            (kind,) = rng.choices(KINDS, weights=(8, 8, 3, 3, 1))
            prompt, length = rng.choice(PROMPTS), rng.choice((8, 48))
            try:
                await getattr(self, "_" + kind.replace(" ", "_"))(
                    prompt, length, priority, rng
                )
                self.seen[kind] += 1
            except openai.RateLimitError as error:
                self.seen["told to come later"] += 1
                await asyncio.sleep(float(error.response.headers["Retry-After"]))
            except openai.APIStatusError as error:
                self.mistakes.append(f"{kind}: {error}")
            except openai.APIError as error:
                # The rest of a stream whose replica was killed.
                if not (self._is_ray and "died" in str(error)):
                    self.mistakes.append(f"{kind}: {error!r}")
                self.seen["cut by a death"] += 1
            bar(sum(self.seen.values()))

    def _ask(self, prompt, length, priority, **options):
        return self._client.completions.create(
            model="pydoc",
            prompt=prompt,
            max_tokens=length,
            temperature=0,
            timeout=600,
            extra_body={"priority": priority},
            **options,
        )

    def _check(self, prompt, length, text, number):
        self.ids[number] += 1
        if text != self._expected[prompt, length]:
            self.mistakes.append(f"{prompt!r} was continued by {text!r}")

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

    async def _wrong(self, prompt, length, priority, rng):
        wrong = rng.choice(({"top_p": 7}, {"unheard": 1}, {"stop": ["x"] * 9}))
        try:
            await self._client.completions.create(
                model="pydoc", prompt=prompt, max_tokens=length, extra_body=wrong
            )
        except openai.BadRequestError:
            return
        self.mistakes.append(f"{wrong} was served")
        del priority


async def disturb(server, minutes):
    """Kill a replica, change the weights, and kill one more."""
    for do in (server.kill_replica, server.change_weights, server.kill_replica):
        await asyncio.sleep(60 * minutes / 4)
        await asyncio.to_thread(do)


async def soak(server, options):
    """Run the crowd, and return what came of it."""
    crowd = Crowd(options)
    await crowd.learn()
    began = time.monotonic()
    last = began

    def bar(count):
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            done = (last - began) / (60 * options.minutes)
            harness.progress(f"{done:.0%}, {count:,} requests")

    await crowd.run(began + 6 * options.minutes, bar)
    early = server.measure()
    late = crowd.run(began + 60 * options.minutes, bar)
    if options.ray:
        await asyncio.gather(late, disturb(server, 0.9 * options.minutes))
    else:
        await late
    return crowd, early, time.monotonic() - began


def judge(server, crowd, early):
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
    grown = server.measure() - early
    # Replicas that were killed have others in their place, which are smaller.
    if grown > MOST_GROWTH:
        wrong.append(f"the process has grown by {grown / 2**20:.0f} MiB")
    return wrong, grown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=60.0)
    add("--clients", type=int, default=200)
    add("--ray", action="store_true", help="replicas on Ray, two of which are killed")
    add("--replicas", type=int, default=3)
    add("--port", type=int, default=8300)
    add("--output", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    server = Server(options)
    try:
        server.wait_until_ready()
        machine = harness.machine()
        crowd, early, seconds = asyncio.run(soak(server, options))
        wrong, grown = judge(server, crowd, early)
    finally:
        status = server.stop()
    waits = {
        name: sorted(crowd.waits[priority])
        for name, priority in (("high priority", -1), ("low priority", 0))
    }
    row = {
        "server": "ray" if options.ray else "http",
        "minutes": round(seconds / 60, 1),
        "clients": options.clients,
        "requests": sum(crowd.seen.values()),
        **crowd.seen,
        "MiB at a tenth": early / 2**20,
        "MiB grown": grown / 2**20,
        "exit status": status,
        "wrong": wrong,
    } | {
        f"s to the first token, {name}": found[len(found) // 2]
        for name, found in waits.items()
        if found
    }
    for name, value in row.items():
        print(f"{name}: {value}")
    name = f"soak_http, {row['server']}"
    harness.save(options.output, {"benchmark": name, "machine": machine, "rows": [row]})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
