"""Wrong inputs of every kind end with one message or a right answer.

`--hypothesis-profile=soak` tries many more, and others each time. What they find becomes a test of
its own where the input is read.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.soak import input_kinds as kinds

SLOW = {"overrides": 5}
"""One example of these kinds takes as long as so many of another one."""


@pytest.mark.parametrize("name", kinds.KINDS)
def test_wrong_inputs(name):
    kind = kinds.KINDS[name]

    @settings(
        max_examples=settings.default.max_examples // SLOW.get(name, 1),
        derandomize=settings.get_current_profile_name() != "soak",
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        value = data.draw(kind.inputs())
        found = kinds.outcome(kind, value)
        assert found.name in kinds.GOOD, f"{value!r:.2000}\n{found.text}"

    try_one()
