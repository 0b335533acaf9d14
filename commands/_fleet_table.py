"""Status of a fleet as text."""

from collections.abc import Mapping
from typing import Any

from coldstart.commands._output import human_bytes, one_line


def render(status: Mapping[str, Any]) -> str:
    """Return the status as plain text."""
    gateway = status["gateway"]
    keys = gateway.get("client_keys_error")
    refused = f"client keys not applied, the former ones remain: {keys}" if keys else ""
    lines = [
        f"{gateway['url']}  pid {gateway['pid']}, up {gateway['uptime_s']:.0f} s, requests {gateway['requests']}, "
        f"waiting {gateway['held']}, in flight {gateway['in_flight']}, readmitted {gateway['readmitted']}, "
        f"rejected {sum(gateway['refused'].values())}",
        *filter(None, [refused]),
    ]
    for server in status["servers"]:
        free = ", ".join(map(human_bytes, server["free_bytes"]))
        draining = "  draining" if server["draining"] else ""
        seen = server.get("observed_bytes_s")
        link = f"link {human_bytes(server['network_bytes_s'])}/s configured"
        link += f", {human_bytes(seen)}/s observed" if seen else ""
        lines.append(
            f"server {server['name']}: free {free} of {human_bytes(server['memory_bytes'])}, {link}{draining}"
        )
    lines += [
        f"server {name} cannot be used: {reason}" for name, reason in status.get("unusable", {}).items()
    ]
    for model in status["models"]:
        error = f"  {model['error']}" if model["error"] else ""
        lines.append(
            f"model {model['name']}: {model['least']} to {model['most']} workers, waiting {model['waiting']}{error}"
        )
        for group in model["groups"]:
            lines += _group(group)
    return "\n".join(map(one_line, lines))


def _group(group: Mapping[str, Any]) -> list[str]:
    where = ", ".join(f"{worker['server']}:{worker['device']}" for worker in group["workers"])
    came = f", {group['mode']} in {group['start_s']:.2f} s" if group["mode"] else ""
    line = f"  {group['name']} {group['phase']} on {where}: in flight {group['in_flight']} of {group['capacity']}{came}"
    return [line, f"    {group['choice']}"] if group.get("choice") else [line]
