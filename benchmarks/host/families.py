"""Traces of requests to many models, in families, for the model cache's benchmarks.

TUNED are the families on which the policy's constants were chosen; it never saw the HELD_OUT ones until the table.
Real traces come from shared/traces beside the project; their rows get models by Zipf's law, by the session that a
prompt belongs to (its second prefix block), or by the trace's own function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from random import Random

from benchmarks import traces
from coldstart.host.policies.protocol import ModelCost

Arrivals = list[tuple[float, str]]
GB = 10**9
HOUR = 3600.0


START_S = (0.5, 2.0, 8.0, 30.0)
"""Set-up seconds of a snapshot, a template, a bundle, and stock vLLM."""


def models(count: int, random: Random) -> dict[str, ModelCost]:
    """Return models of log-normal size (1 to 48 GB) whose penalty is a set-up time plus bytes over 1 to 6 GB/s."""
    found = {}
    for number in range(count):
        size = min(48.0, max(1.0, random.lognormvariate(math.log(8), 0.9)))
        penalty = random.choice(START_S) * random.uniform(0.8, 1.25) + size / random.uniform(1.0, 6.0)
        found[f"model-{number}"] = ModelCost(round(size * GB), penalty)
    return found


def capacity(costs: dict[str, ModelCost], share: float) -> int:
    """Return `share` of all models' bytes, at least the size of the largest model."""
    sizes = [cost.memory for cost in costs.values()]
    return max(round(share * sum(sizes)), *sizes)


def zipf(count: int, exponent: float, random: Random) -> list[float]:
    """Return Zipf shares of popularity in random order, independent of sizes."""
    weights = [1 / (rank + 1) ** exponent for rank in range(count)]
    random.shuffle(weights)
    total = sum(weights)
    return [weight / total for weight in weights]


def renewal(rate: float, cv: float, end: float, random: Random) -> Iterator[float]:
    """Yield arrivals with Gamma gaps of the given rate per second and coefficient of variation."""
    shape, now = 1 / cv**2, random.expovariate(rate)
    while now < end:
        yield now
        now += random.gammavariate(shape, 1 / (rate * shape))


def thinned(rate: Callable[[float], float], top: float, end: float, random: Random) -> Iterator[float]:
    """Yield a Poisson process with a changing rate of at most `top`."""
    for now in renewal(top, 1.0, end, random):
        if random.random() * top < rate(now):
            yield now


def _merge(streams: dict[str, Iterator[float]]) -> Arrivals:
    return sorted((time, name) for name, times in streams.items() for time in times)


def gamma(
    cv: float, names: list[str], random: Random, requests: int = 3000, end: float = 6 * HOUR
) -> Arrivals:
    shares = zipf(len(names), 1.0, random)
    rate = requests / end
    return _merge({n: renewal(rate * share, cv, end, random) for n, share in zip(names, shares, strict=True)})


def churn(
    names: list[str], random: Random, parts: int = 12, requests: int = 250, part_s: float = HOUR / 2
) -> Arrivals:
    """Return a load whose popularity is shuffled after each part, by default of half an hour."""
    drawn = ((part, gamma(1.0, names, random, requests, part_s)) for part in range(parts))
    return [(part * part_s + time, name) for part, arrivals in drawn for time, name in arrivals]


def cron(names: list[str], random: Random) -> Arrivals:
    """Return a load with periodic requests with jitter to half of the models and random requests to the others."""
    end, streams = 6 * HOUR, dict[str, Iterator[float]]()
    shares = zipf(len(names), 1.0, random)
    for number, name in enumerate(names):
        if number % 2:
            streams[name] = renewal(1000 / end * shares[number], 1.0, end, random)
        else:
            streams[name] = _periodic(random.choice((120.0, 300.0, 600.0, 900.0, 1800.0)), end, random)
    return _merge(streams)


def _periodic(period: float, end: float, random: Random) -> Iterator[float]:
    now = random.uniform(0, period)
    while now < end:
        yield max(0.0, now + random.gauss(0, period / 50))
        now += period


def scans(names: list[str], random: Random) -> Arrivals:
    """Return a skewed load with a request to every model once in forty minutes."""
    found = gamma(1.0, names, random, 2500)
    for start in range(1200, int(6 * HOUR), 2400):
        order = random.sample(names, len(names))
        found += [(start + 3.0 * place, name) for place, name in enumerate(order)]
    return sorted(found)


def diurnal(names: list[str], random: Random) -> Arrivals:
    """Return three days of load in which each model has its busy hours."""
    end, shares = 72 * HOUR, zipf(len(names), 0.8, random)
    streams = {}
    for name, share in zip(names, shares, strict=True):
        phase, top = random.uniform(0, 24 * HOUR), 4 * 4000 / end * share
        streams[name] = thinned(_hours(phase, top), top, end, random)
    return _merge(streams)


def _hours(phase: float, top: float) -> Callable[[float], float]:
    return lambda now: top * max(0.01, math.cos((now - phase) * 2 * math.pi / (24 * HOUR))) ** 2


def alternate(names: list[str], random: Random) -> Arrivals:
    """Return a load in which each model is used for about half an hour and then idle for some hours."""
    end, shares = 24 * HOUR, zipf(len(names), 0.8, random)
    return _merge({n: _spells(4000 * s * 6 / end, end, random) for n, s in zip(names, shares, strict=True)})


def _spells(rate: float, end: float, random: Random) -> Iterator[float]:
    start = random.expovariate(1 / (2.5 * HOUR))
    while start < end:
        length = random.expovariate(1 / (HOUR / 2))
        yield from (start + t for t in renewal(rate, 1.0, min(length, end - start), random))
        start += length + random.expovariate(1 / (2.5 * HOUR))


def flash(names: list[str], random: Random) -> Arrivals:
    """Return a skewed load with occasional bursts of requests to one model that last some minutes."""
    found = gamma(1.0, names, random, 2000)
    for start in renewal(1 / 900, 1.0, 6 * HOUR, random):
        name = random.choice(names)
        found += [(start + random.expovariate(1 / 120), name) for _ in range(40)]
    return sorted(found)


def sessions(names: list[str], random: Random) -> Arrivals:
    """Agents: a session calls its own two or three models in turn, some seconds apart, for some dozen turns."""
    found: Arrivals = []
    weights = zipf(len(names), 0.7, random)
    for start in renewal(150 / (6 * HOUR), 1.0, 6 * HOUR, random):
        team = random.choices(names, weights, k=random.choice((1, 2, 3)))
        now = start
        for turn in range(round(random.expovariate(1 / 20)) + 1):
            found.append((now, team[turn % len(team)]))
            now += random.lognormvariate(math.log(20), 1.0)
    return sorted(found)


def mcache(names: list[str], random: Random) -> Arrivals:
    """The paper's recipe (6.1): services of long-tailed popularity without the top tenth, an hour, each a random model."""
    popularity = sorted(random.lognormvariate(0, 2.3) for _ in range(120))[:108]
    bound = [random.choice(names) for _ in popularity]
    services = random.choices(range(len(popularity)), popularity, k=2389)
    return sorted((random.uniform(0, HOUR), bound[service]) for service in services)


def azure_llm(names: list[str], random: Random) -> Arrivals:
    """Every sixth row of a conversation service's hour, model by Zipf's law."""
    shares = zipf(len(names), 1.0, random)
    rows = traces.azure_conversation()[random.randrange(6) :: 6]
    return [(row.arrival_s, random.choices(names, shares)[0]) for row in rows]


def mooncake(names: list[str], random: Random) -> Arrivals:
    """An hour of conversations; all turns of one go to one model, conversations to models by Zipf's law."""
    shares, of, found = zipf(len(names), 1.0, random), dict[int, str](), list[tuple[float, str]]()
    for row in traces.mooncake_conversation():
        name = of.setdefault(row.hash_ids[0], random.choices(names, shares)[0])
        found.append((row.arrival_s, name))
    return found[random.randrange(3) :: 3]


def _functions() -> dict[int, list[float]]:
    """Start times of each function, in order."""
    found: dict[int, list[float]] = {}
    for at, function in traces.azure_functions():
        found.setdefault(function, []).append(at)
    return {name: sorted(times) for name, times in found.items()}


def azure_functions(names: list[str], random: Random) -> Arrivals:
    """Twenty minutes of 31 functions, each as a model."""
    return sorted(
        (time, names[i % len(names)]) for i, times in enumerate(_functions().values()) for time in times
    )


def azure_bootstrap(names: list[str], random: Random) -> Arrivals:
    """Six hours of the same functions' gaps, drawn with replacement; which function a model follows is drawn too."""
    usable = [times for times in _functions().values() if len(times) > 2]
    return _merge({name: _bootstrap(random.choice(usable), 6 * HOUR, random) for name in names})


def _bootstrap(times: list[float], end: float, random: Random) -> Iterator[float]:
    gaps = [max(0.05, later - earlier) for earlier, later in pairwise(times)]
    draws = iter(lambda: random.choice(gaps), None)
    for now in accumulate(draws, initial=random.uniform(0, 600)):
        if now >= end:
            return
        yield now


Family = Callable[[list[str], Random], Arrivals]
TUNED: dict[str, Family] = {
    "gamma CV 4": lambda names, random: gamma(4.0, names, random),
    "churn": churn,
    "cron": cron,
    "on and off": alternate,
    "Azure LLM 2023": azure_llm,
    "mCache recipe": mcache,
}
HELD_OUT: dict[str, Family] = {
    "Poisson": lambda names, random: gamma(1.0, names, random),
    "gamma CV 8": lambda names, random: gamma(8.0, names, random),
    "scans": scans,
    "diurnal": diurnal,
    "flash crowds": flash,
    "agent sessions": sessions,
    "Mooncake": mooncake,
    "Azure functions": azure_functions,
    "Azure functions, bootstrapped": azure_bootstrap,
}


def trace(family: str, seed: int) -> tuple[Arrivals, dict[str, ModelCost]]:
    """The arrivals, in order, and the models that they ask for."""
    random = Random(f"{family}/{seed}")
    count = {"mCache recipe": 7, "Azure functions": 31}.get(family, random.choice((12, 18, 24)))
    costs = models(count, random)
    arrivals = {**TUNED, **HELD_OUT}[family](list(costs), random)
    asked = {name for _, name in arrivals}
    return arrivals, {name: cost for name, cost in costs.items() if name in asked}
