"""A page of another site in a real browser, beside a running host: it reads nothing and changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import Stage, run, staged
from tools.chromium import Page
from tools.raw_server import Asked, answer, answering

from coldstart.host.endpoint import GatewayEndpoint

# Each attack of the foreign page: what it returns is what it could read; null or an error is nothing.
READS = {
    "status": "fetch(HOST + '/status').then(one => one.text())",
    "logs": "fetch(HOST + '/logs/a').then(one => one.text())",
    "no-cors": "fetch(HOST + '/status', {mode: 'no-cors'}).then(one => one.text())",
    "script": """new Promise((done, failed) => { const one = document.createElement('script');
        one.onload = () => done('loaded'); one.onerror = failed; one.src = HOST + '/status'; document.head.append(one); })""",
    "events": """new Promise((done, failed) => { const one = new EventSource(HOST + '/logs/a?follow');
        one.onmessage = () => done('message'); one.onerror = () => { one.close(); failed(Error('refused')); }; })""",
    "websocket": """new Promise((done, failed) => { const one = new WebSocket(HOST.replace('http', 'ws') + '/status');
        one.onopen = () => done('open'); one.onerror = () => failed(Error('refused')); })""",
    "frame": """new Promise(done => { const one = document.createElement('iframe'); one.src = HOST + '/ui';
        one.onload = () => { try { done(one.contentDocument.body.innerText || null); } catch { done(null); } };
        document.body.append(one); })""",
}
CHANGES = {
    "text": "fetch(HOST + '/unload/a', {method: 'POST', mode: 'no-cors', body: '{}'})",
    "json": """fetch(HOST + '/unload/a', {method: 'POST', body: '{}', headers: {'Content-Type': 'application/json'}})""",
    "beacon": "navigator.sendBeacon(HOST + '/unload/a', new Blob(['{}'], {type: 'application/json'}))",
    "tokens": """fetch(HOST + '/v1/completions', {method: 'POST', mode: 'no-cors',
        body: JSON.stringify({model: 'a', prompt: 'stolen'})})""",
    "form": """new Promise(done => { const form = document.createElement('form'), frame = document.createElement('iframe');
        frame.name = 'f'; frame.onload = () => done('sent'); document.body.append(frame, form);
        Object.assign(form, {action: HOST + '/unload', method: 'POST', enctype: 'text/plain', target: 'f'});
        form.submit(); })""",
    "picture": """new Promise(done => { const one = new Image(); one.onerror = () => done('sent');
        one.src = HOST + '/unload/a'; })""",
}
LINGER_MS = 200


def _respond(connection: Any, asked: Asked) -> None:
    answer(connection, 200, {"Content-Type": "text/html"}, b"<!doctype html><title>foreign</title><body>")


def attack(directory: Path, work: Any) -> None:
    """Run `work(host_url)` in a thread, beside a host that serves model a and has answered one request."""

    async def both() -> None:
        async with staged(directory, gateway={"endpoint": GatewayEndpoint()}) as stage:
            assert (await stage.ask(model="a", prompt="good"))[0] == 200
            await asyncio.to_thread(work, stage.url)
            _is_unchanged(stage)

    run(both())


def _is_unchanged(stage: Stage) -> None:
    assert stage.servers.last("a").asked == ["good"] and len(stage.servers.begun) == 1
    assert "a" in stage.driver.lifecycle.residences


def evaluate_in_foreign_page(page: Page, host: str, script: str) -> Any:
    """Return what a script finds in a page of another site; null where it fails. It knows the host as HOST."""
    with answering(_respond) as foreign:
        page.open(f"http://evil.test:{foreign.port}/")
        # The script is worth something only in the foreign page.
        assert page.evaluate("[location.hostname, document.title]") == ["evil.test", "foreign"]
        return page.evaluate(f"Promise.resolve({script.replace('HOST', repr(host))}).catch(error => null)")


@pytest.mark.parametrize("name", READS)
def test_foreign_page_reads_nothing(name: str, page: Page, tmp_path: Path) -> None:
    def work(host: str) -> None:
        assert evaluate_in_foreign_page(page, host, READS[name]) in (None, "")

    attack(tmp_path, work)


@pytest.mark.parametrize("name", CHANGES)
def test_foreign_page_changes_nothing(name: str, page: Page, tmp_path: Path) -> None:
    def work(host: str) -> None:
        linger = f"new Promise(done => setTimeout(done, {LINGER_MS}))"
        evaluate_in_foreign_page(page, host, CHANGES[name])
        page.evaluate(linger)
        # The host has handled what was sent before this.
        page.open(f"{host}/health")

    attack(tmp_path, work)


@pytest.mark.parametrize("path", ["/status", "/logs/a", "/metrics", "/v1/models", "/ui"])
def test_page_of_a_rebound_name_reads_nothing(path: str, page: Page, tmp_path: Path) -> None:
    def work(host: str) -> None:
        # The browser resolves the foreign name to the host's address: page and host have the same origin.
        page.open(f"http://rebound.test:{host.rpartition(':')[2]}/")
        told = page.evaluate(f"fetch('{path}').then(one => one.text().then(text => [one.status, text]))")
        assert told[0] == 421 and "good" not in told[1] and "resident" not in told[1]
        changed = (
            "fetch('/unload/a', {method: 'POST', body: '{}', headers: {'Content-Type': 'application/json'}})"
        )
        assert page.evaluate(f"{changed}.then(one => one.status)") == 421

    attack(tmp_path, work)
