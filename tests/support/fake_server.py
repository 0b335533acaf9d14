"""A fake of an OpenAI-compatible server, for unit tests only: it answers with made-up tokens.

Usage: fake_server.py PORT READY_FILE BEHAVIOUR
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SALT = 1 if "other-tokens" in sys.argv else 0
ASKED: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = os.environ.get("VLLM_API_KEY")
        if "refuses" in sys.argv or (key and self.headers["Authorization"] != f"Bearer {key}"):
            self.reply("too long", "text/plain", 400)
            return
        # The first request streams; then each of two prompts is asked alone; what comes after is a crowd.
        ASKED.append(request["prompt"])
        salt = 1 if "other-in-crowds" in sys.argv and len(ASKED) > 3 and request["prompt"] == "a" else SALT
        tokens = [(sum(request["prompt"].encode()) + i + salt) % 97 for i in range(request["max_tokens"])]
        choice = {
            "index": 0,
            "text": " ".join(map(str, tokens)),
            "token_ids": tokens,
            "finish_reason": "length",
        }
        if request["stream"]:
            self.reply(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n", "text/event-stream")
        else:
            self.reply(json.dumps({"choices": [choice]}), "application/json")

    def reply(self, text: str, kind: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def daemonize() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def main() -> None:
    port, ready, behaviour = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if behaviour == "dies":
        sys.exit("the engine could not start")
    if behaviour == "no-bundle":
        sys.exit(3)
    if behaviour == "daemon":
        daemonize()
    if behaviour in ("busy", "daemon"):
        while time.process_time() < 0.15:
            pass
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if behaviour == "silent":
        time.sleep(3600)
    reasons = {
        "fell-back": ("compile", "another ISA"),
        "other-canary": ("canary", "a fresh start generated a token that differs from the bundle's canary"),
    }
    fallbacks = (
        [dict(zip(("section", "reason"), reasons[behaviour], strict=True))] if behaviour in reasons else []
    )
    state = {
        "pid": os.getpid(),
        "mode": sys.argv[4],
        "fast_path": {"compile": not fallbacks},
        "fallbacks": fallbacks,
    }
    if behaviour != "unready":
        ready.with_suffix(".tmp").write_text(json.dumps(state))
        ready.with_suffix(".tmp").rename(ready)
    server.serve_forever()


if __name__ == "__main__":
    main()
