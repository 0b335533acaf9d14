"""A running host takes another configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coldstart.host import events
from coldstart.host.configuration import HostFile
from coldstart.host.model_state import State

if TYPE_CHECKING:
    from coldstart.gateway.driver import Driver


def configure(driver: Driver, file: HostFile) -> None:
    """Between two requests. Raises Usage and changes nothing where it cannot be taken."""
    before, driver.catalogue = driver.catalogue, file.catalogue
    try:
        driver.tell(events.Configured(file.models, file.settings))
    except BaseException:
        driver.catalogue = before
        raise
    driver.record.described(file)
    _forget(driver)
    running = {name: held.launch for name, held in driver.templates.engines()}
    running |= {name: residence.launch for name, residence in driver.residences.items()}
    for name, launch in running.items():
        if driver.outdated(launch) and driver.core.models[name].state is not State.STARTING:
            driver.tell(events.Outdated(name))
    driver.templates.keep()


def _forget(driver: Driver) -> None:
    """What was counted of models that are no more."""
    for name in [name for name in driver.facts.models if name not in driver.catalogue.launches]:
        if name not in driver.core.models:
            del driver.facts.models[name]
