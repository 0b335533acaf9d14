"""Names and arguments of a host's models."""

from __future__ import annotations

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.launches import Catalogue, Destination, Launch


def _launch(name: str, *args: str, aliases: tuple[str, ...] = ()) -> Launch:
    return Launch(name, name, Arguments(args), aliases)


def test_every_name_leads_to_its_model_under_the_name_its_server_knows() -> None:
    tuned = _launch("a", "--lora-modules", "x=/x", '{"name": "y", "path": "/y"}', aliases=("alpha",))
    named = _launch("b", "--served-model-name", "first", "second")
    catalogue = Catalogue([tuned, named])
    routes = {
        name: catalogue.find_destination(name) for name in ("a", "alpha", "x", "y", "b", "first", "second")
    }
    assert routes == {
        "a": Destination("a", "a"), "alpha": Destination("a", "a"), "x": Destination("a", "x"), "y": Destination("a", "y"),
        "b": Destination("b", "first"), "first": Destination("b", "first"), "second": Destination("b", "first"),
    }  # fmt: skip
    assert catalogue.find_destination("nobody") is None and catalogue.find_destination(None) is None
    assert Catalogue([tuned]).find_destination(None) == Destination("a", "a")
    assert named.served_names == ("first", "second")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"mode": "quickly"}, "unknown mode 'quickly'"),
        ({"on_miss": "materialize"}, "unknown on_miss 'materialize'"),
        ({"args": ["--port", "1"]}, "args must not contain --port, which the host sets"),
        ({"args": [5]}, r"args\[0\]: expected `str`, got `int`"),
        ({"args": "--x"}, "args: expected `array`, got `str`"),
        ({"pinned": "yes"}, "pinned: expected `bool`, got `str`"),
        ({"idle": 5}, "models.m: unknown key idle"),
    ],
)
def test_invalid_arguments_are_named(given: dict[str, object], complaint: str) -> None:
    model = {"memory": 5, "start_s": 1.0, **given}
    with pytest.raises(UsageError, match=complaint):
        configuration.parse({"memory": 10, "models": {"m": model}})
