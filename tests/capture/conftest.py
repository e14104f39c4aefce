from __future__ import annotations

import pytest

from rooftile import devices
from rooftile.devices import Device


@pytest.fixture(scope="session")
def h100() -> Device:
    return devices.load("h100-sxm")
