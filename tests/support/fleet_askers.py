"""Clients that send requests to a fleet without a pause and record the results."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

from support.fake_model import generated
from support.fleet_on_ray import Fleet


class Streaming:
    """Concurrent streams; `made` has the tokens of each, or its error."""

    def __init__(self, fleet: Fleet, model: str, count: int, length: int) -> None:
        self.fleet, self.model, self.length = fleet, model, length
        self.made: list[list[Any]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def _run(self, number: int) -> None:
        body = {"model": self.model, "prompt": f"p{number}", "stream": True, "max_tokens": self.length}
        data = json.dumps({**body, "temperature": 0}).encode()
        url, headers = self.fleet.url + "/v1/completions", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    self.made[number].append(said.get("error") or int(said["choices"][0]["text"]))

    def is_streaming(self) -> bool:
        return all(map(len, self.made))

    def __enter__(self) -> Streaming:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(60)
        assert self.made == [generated(f"p{n}", self.length) for n in range(len(self.made))]


class Asking:
    """Client that repeats a request; `failed` lists the errors."""

    def __init__(self, fleet: Fleet, model: str, **body: Any) -> None:
        self.fleet, self.model, self.body = fleet, model, body
        self.answers: list[Any] = []
        self.failed: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(self.fleet.ask(self.model, **self.body))
            except urllib.error.HTTPError as error:
                self.failed.append(error.read().decode())
            except OSError as error:
                self.failed.append(str(error))

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
