"""How hosts of a rendezvous know each other, with names and routes that are made up."""

import socket

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from dlrm_sharded.ranks import rendezvous
from dlrm_sharded.ranks.rendezvous import reached_address

HERE, THERE, LOOPBACK = "10.0.0.1", "10.0.0.2", "127.0.1.1"


@pytest.mark.parametrize(
    ("endpoint", "way", "torch_serves", "address", "options"),
    [
        ("a", (HERE, HERE), True, "a", {}),
        (HERE, (HERE, HERE), False, HERE, {"is_host": True}),
        (HERE, (HERE, HERE), None, HERE, {"is_host": True}),
        ("a", ("127.0.0.1", LOOPBACK), True, "a", {}),
        ("a", ("127.0.0.1", LOOPBACK), False, "a", {}),
        ("b", (HERE, THERE), False, HERE, {}),
        ("b", (HERE, THERE), True, HERE, {"is_host": False}),
        ("b", (HERE, THERE), None, HERE, {"is_host": False}),
    ],
)
def test_the_address_of_this_host(
    endpoint, way, torch_serves, address, options, monkeypatch: pytest.MonkeyPatch
):
    """By routes, as what the system says of its own name is of no use on other hosts."""

    def matches(host: str) -> bool:
        if torch_serves is None:
            raise socket.gaierror("unknown name")
        return torch_serves

    monkeypatch.setattr(rendezvous, "source_towards", lambda host: way)
    monkeypatch.setattr(rendezvous, "_matches_machine_hostname", matches)
    parameters = RendezvousParameters("c10d", f"{endpoint}:29500", "job", 1, 2)
    assert (reached_address(parameters), parameters.config) == (address, options)


def test_options_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "source_towards", lambda host: (HERE, HERE))
    parameters = RendezvousParameters("c10d", "a:1", "job", 1, 2, local_addr="mine", is_host=0)
    assert (reached_address(parameters), parameters.config) == ("mine", {"is_host": 0})
